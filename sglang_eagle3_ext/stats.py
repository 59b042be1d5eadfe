"""Accept length while serving: what the log says, and the alarm when a draft does not help.

Counts arrive on the host with SGLang's own result processing, so measuring costs no device sync.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

LOG_EVERY_ROUNDS = 1000


@dataclass
class AcceptStats:
    """Accepted drafts over all requests of this worker.

    Attributes:
        steps: drafts proposed along one path.
        alarm_below: accept length under which the alarm rings; 0 never.
        alarm_rounds: request-rounds looked at before the alarm decides.
        reached: reached[i] counts the rounds in which at least i drafts were accepted.
    """

    steps: int
    alarm_below: float
    alarm_rounds: int
    hint: str
    reached: list[int] = field(default_factory=list)
    alarmed: bool = False
    _next_log: int = LOG_EVERY_ROUNDS

    def __post_init__(self) -> None:
        self.reached = [0] * (self.steps + 1)

    @property
    def rounds(self) -> int:
        """Request-rounds verified."""
        return self.reached[0]

    @property
    def accept_length(self) -> float:
        """Mean tokens per verify round, bonus included; 0.0 before the first round."""
        return 1 + sum(self.reached[1:]) / self.rounds if self.rounds else 0.0

    @property
    def per_position(self) -> list[float]:
        """Chance that draft i is accepted, given that all before it were; stops where none came."""
        return [
            later / sooner for sooner, later in zip(self.reached, self.reached[1:], strict=False) if sooner
        ]

    def add(self, correct_drafts: list[int]) -> None:
        """Count one round: accepted drafts of each request, bonus excluded."""
        for count in correct_drafts:
            for i in range(count + 1):
                self.reached[i] += 1
        if not self.alarmed and self.rounds >= self.alarm_rounds:
            self._judge()
        if self.rounds >= self._next_log:
            self._next_log = self.rounds + LOG_EVERY_ROUNDS
            logger.info(self.line())

    def line(self) -> str:
        """One line for the log."""
        positions = " ".join(f"{p:.2f}" for p in self.per_position)
        return (
            f"EAGLE3X accept length {self.accept_length:.2f} over {self.rounds} rounds; "
            f"acceptance by position {positions}"
        )

    def _judge(self) -> None:
        self.alarmed = True
        logger.info(self.line())
        if self.accept_length < self.alarm_below:
            logger.warning(
                "EAGLE3X ALARM: accept length %.2f over the first %d rounds is below %.2f: this draft "
                "costs more than it saves.\n"
                "    likely causes, most frequent first: the draft was trained on other taps than are "
                "served; another chat template or target revision than in training; a quantised target; "
                "a draft trained on other text.\n"
                "    hint: %s",
                self.accept_length,
                self.rounds,
                self.alarm_below,
                self.hint,
            )
