"""One engine: reads a job as JSON on standard input, writes the answers to its file; see serve.py."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import sglang


async def abort(engine: Any, step: dict[str, Any]) -> list[Any]:
    """Send all requests at once, abort the named ones after their first tokens, wait for the others."""

    async def one(i: int, ids: list[int]) -> Any:
        stream = await engine.async_generate(
            input_ids=ids, sampling_params=step["sampling"], stream=True, rid=f"r{i}"
        )
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            if i in step["abort"]:
                engine.tokenizer_manager.abort_request(rid=f"r{i}")
        return chunks[-1]

    return await asyncio.gather(*(one(i, ids) for i, ids in enumerate(step["input_ids"])))


def ask(engine: Any, step: dict[str, Any]) -> Any:
    if step["do"] == "flush":
        return engine.flush_cache() and None
    if step["do"] == "stream":
        return [[chunk["output_ids"] for chunk in engine.generate(**step["arguments"], stream=True)]]
    if step["do"] == "refused":
        try:
            return {"answer": engine.generate(**step["arguments"])}
        except ValueError as error:
            return {"error": str(error)}
    if step["do"] == "abort":
        return engine.loop.run_until_complete(abort(engine, step))
    return engine.generate(**step["arguments"])


if __name__ == "__main__":
    job = json.loads(sys.stdin.read())
    engine = sglang.Engine(log_level="info", **job["engine"])
    try:
        answers = [ask(engine, step) for step in job["steps"]]
    finally:
        engine.shutdown()
    with open(job["out"], "w") as out:
        json.dump(answers, out)
