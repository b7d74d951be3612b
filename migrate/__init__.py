"""From other set-ups: an Accelerate FSDP1 configuration, an optimizer that was made before sharding."""
