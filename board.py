"""Writes a run's rows to TensorBoard (`log.tensorboard`)."""

import contextlib
import logging
import math
import pathlib

from torch.utils.tensorboard import SummaryWriter

import schema

log = logging.getLogger("train")


class Board:
    """Every finite number of a row, by its kind and name. If it fails, training goes on without it."""

    def __init__(self, folder: pathlib.Path, start: int):
        """Drops what it has of steps after `start`."""
        self.writer: SummaryWriter | None = SummaryWriter(folder, purge_step=start + 1)

    def write(self, row: dict) -> None:
        if not self.writer:
            return
        try:
            for key, value in schema.flatten(row).items():
                if (
                    isinstance(value, int | float)
                    and math.isfinite(value)
                    and key not in ("step", "batch_digest")
                ):
                    self.writer.add_scalar(f"{row['kind']}/{key}", value, row["step"])
        except Exception as error:  # it re-raises whatever its writer thread raised
            self.writer = None
            log.warning("TensorBoard: %s; it gets no more rows of this launch", error)

    def close(self) -> None:
        if self.writer:
            with contextlib.suppress(Exception):
                self.writer.close()
