"""Everything around a run's training: its folder, status and lock, stop requests, timeouts, launching its ranks."""

# exit codes; 75 is EX_TEMPFAIL: start again to resume
INPUT_IS_WRONG, DOES_NOT_FIT, STOPPED = (2, 3, 75)
