"""A run inside its ranks: its folder, status and lock, stop requests, timeouts. launch/ starts the
ranks."""

import signal

INPUT_IS_WRONG = 2  # exit codes
DOES_NOT_FIT = 3
STOPPED = 75  # EX_TEMPFAIL: start again to resume

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # that ask a run to stop
TWICE_SECONDS = 5.0  # a second Ctrl-C within this time of the first quits at once
