"""A worker is killed under load: clients of the router notice a slower answer at most."""

import asyncio
from pathlib import Path

import aiohttp

from .processes import MODEL, chat, fleet, heard, until


def conversation(topic: str) -> list[dict[str, str]]:
    """A prompt of some 100 tokens."""
    return [{"role": "user", "content": f"Tell me about {topic}. " + f"I like {topic} a lot. " * 14}]


async def test_a_killed_worker_is_survived_and_its_place_in_the_index_goes(tmp_path: Path) -> None:
    with fleet(tmp_path, "a", "b", router_words=("--lease-s", "1.5", "--grace-s", "3")) as started:
        await started.wait_all_take_prompts()
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(started.router, timeout=timeout) as client:
            held = await chat(client, conversation("trains"))
            await heard(client, conversation("trains"), 4)
            victim = held.worker
            other = "b" if victim == "a" else "a"
            waiting = [
                asyncio.create_task(chat(client, conversation(topic), max_tokens=16))
                for topic in ("ships", "planes", "bikes", "trains")
            ]
            await asyncio.wait(waiting, timeout=0.2)
            started.workers[victim].kill()
            answers = await asyncio.gather(*waiting)
            assert all(answer.text for answer in answers)
            again = await chat(client, conversation("trains"))
            assert again.worker == other

            async def forgotten() -> bool:
                async with client.get("/v1/workers") as response:
                    return [row["worker"] for row in (await response.json())["workers"]] == [other]

            await until(forgotten)
            async with client.post("/v1/route", json={"model": MODEL, "messages": conversation("trains")}) as response:
                assert [row["worker"] for row in (await response.json())["candidates"]] == [other]
