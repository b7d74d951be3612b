"""Runs a function on several real processes over gloo."""

import gc
import logging
import multiprocessing
import os
import queue
import socket
import traceback
import warnings
from collections.abc import Callable
from typing import Any


def run_on_ranks(ranks: int, function: Callable, *arguments: Any, timeout: float = 240) -> list:
    """Results of function(*arguments) by rank, each in a process of its own that sees what torchrun would set.

    The function must be importable. A failure on any rank ends all and is raised here with its traceback; a warning, of
    torch's log too, is one.
    """
    # Each is forked from a server that has imported torch and done nothing with it: four seconds saved a process.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch",
            "torch.distributed.fsdp",
            "torch.distributed.checkpoint",
            "torch._dynamo",
            "tests.cases",
        ]
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = context.Queue()
    processes = [
        context.Process(
            target=_child,
            args=(rank, ranks, port, results, function, arguments),
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < ranks:
            try:
                rank, error, value = results.get(timeout=1)
            except queue.Empty:
                timeout -= 1
                dead = [p.exitcode for p in processes if p.exitcode not in (None, 0)]
                assert timeout > 0 and not dead, (
                    f"ranks hang or died: {[p.exitcode for p in processes]}"
                )
                continue
            assert error is None, f"rank {rank}:\n{error}"
            found[rank] = value
        for process in processes:
            process.join(30)
        assert [p.exitcode for p in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
    return [found[rank] for rank in range(ranks)]


def _child(
    rank: int,
    ranks: int,
    port: int,
    results: Any,
    function: Callable,
    arguments: tuple,
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    gc.freeze()  # a collection need not look through all that torch's import made, nor when a run unfreezes its own
    gc.freeze = gc.unfreeze = lambda: None
    try:
        import torch

        torch.set_num_threads(1)
        heard: list[str] = []
        warnings.showwarning = lambda message, category, *place: heard.append(
            f"{category.__name__}: {message} {place}"
        )
        logging.getLogger("torch").handlers[0].emit = lambda record: heard.append(
            record.getMessage()
        )
        value = function(*arguments)
        # a CUDA build on a CPU
        heard = [text for text in heard if "No CUDA runtime is found" not in text]
        assert not heard, f"warnings, which a run would print: {heard}"
        results.put((rank, None, value))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
        results.close()
        results.join_thread()
        os._exit(1)
