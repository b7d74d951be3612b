"""From other set-ups."""
