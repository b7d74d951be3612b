"""What a preparation says of itself while it goes on."""

import contextlib
import shutil
import time
from collections.abc import Callable
from typing import TextIO

import config

BAR = 16  # characters


class Bar:
    """How far a preparation is, for a person: every half second where the next line may overwrite it."""

    def __init__(self, d: config.Data, at: dict, say: Callable[..., None]):
        self.d, self.at, self.say = d, at, say
        self.known, self.first_share = at["characters"], None
        self.began = self.said = time.monotonic()

    def show(self, share: float | None) -> None:
        """share: of the source, read so far."""
        now = time.monotonic()
        if self.d.max_tokens:
            share = max(share or 0.0, min(1.0, self.at["tokens"]["train"] / self.d.max_tokens))
        self.first_share = share if self.first_share is None else self.first_share
        if now - self.said < 0.5:
            return
        self.said, seconds, parts = now, now - self.began, []
        if share is not None:
            done = round(BAR * share)
            parts.append(f"[{'#' * done}{'.' * (BAR - done)}] {share:.1%}")
            if share > self.first_share:
                rest = int(seconds * (1 - share) / (share - self.first_share))
                parts.append(f"{rest // 3600}:{rest // 60 % 60:02d}:{rest % 60:02d} left")
        documents, tokens = (sum(self.at[what].values()) for what in ("documents", "tokens"))
        rate = (self.at["characters"] - self.known) / seconds
        parts += [f"{rate / 1e6:.1f} MB/s", f"{tokens:,} tokens", f"{documents:,} documents"]
        self.say(f"{self.d.source[-24:]}: {', '.join(parts)}", passing=True)


class Console:
    """say() of prepare(): passing lines overwrite each other on a terminal, and come every ten seconds elsewhere."""

    def __init__(self, stream: TextIO | None):
        """Where nobody can be told, a closed stream or a full disk, it goes on without."""
        self.stream, self.terminal, self.last = stream, bool(stream) and stream.isatty(), time.monotonic()
        self.over = ""  # what removes the passing line that stands there

    def __call__(self, text: str, passing: bool = False) -> None:
        if passing and self.terminal:
            text = text[: shutil.get_terminal_size().columns - 1]
            self._print(self.over + text, end="")
            self.over = "\r\x1b[K"
        elif not passing or time.monotonic() - self.last > 10:
            self.last = time.monotonic()
            self._print(self.over + text)
            self.over = ""

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *error: object) -> None:
        self._print(self.over, end="")

    def _print(self, text: str, end: str = "\n") -> None:
        with contextlib.suppress(OSError):
            print(text, end=end, file=self.stream, flush=True)
