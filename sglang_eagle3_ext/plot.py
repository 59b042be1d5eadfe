"""The demo's comparison as a picture.

Knows the acts as ``demo.report`` lists them; needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

BARS = ("#8a8f98", "#d1495b", "#2a7f62")
NAMES = {
    "no_speculation": "no speculation",
    "stock_taps": "SGLang's\ndefault taps",
    "trained_taps": "the trained\ntaps",
}


def figure(acts: Sequence[dict[str, Any]], subtitle: str) -> Any:
    """Two panels: accept length, and tok/s against no speculation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    served = [act for act in acts if act["name"] in NAMES]
    labels = [NAMES[act["name"]] for act in served]
    made = Figure(figsize=(9, 4.2), layout="constrained")
    made.suptitle(f"One draft, two sets of hidden states\n{subtitle}", fontsize=12)
    panels = made.subplots(1, 2)
    # Without a draft every pass of the target gives one token.
    lengths = [act["accept_length"] or 1.0 for act in served]
    speeds = [act["speedup"] for act in served]
    for panel, values, title, form in (
        (panels[0], lengths, "accept length (tokens per target pass)", "{:.2f}"),
        (panels[1], speeds, "tok/s against no speculation, same run", "{:.2f}x"),
    ):
        bars = panel.bar(labels, values, color=BARS[: len(values)], width=0.62)
        panel.bar_label(bars, [form.format(v) for v in values], padding=3)
        panel.set_title(title, fontsize=10)
        panel.axhline(1.0, color="#444444", linewidth=0.8, linestyle=":")
        panel.set_ylim(0, max(values) * 1.18)
        panel.spines[["top", "right"]].set_visible(False)
    return made


def write(acts: Sequence[dict[str, Any]], file: Path, subtitle: str) -> None:
    """Draw and save as PNG."""
    figure(acts, subtitle).savefig(file, dpi=144)
