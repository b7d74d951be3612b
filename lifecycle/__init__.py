"""One run among others: its folder, status and lock, requests to stop, timeouts, and the launch around its ranks."""

INPUT_IS_WRONG, DOES_NOT_FIT, STOPPED = 2, 3, 75  # exit codes; 75 is EX_TEMPFAIL: start again to resume
