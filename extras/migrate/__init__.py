"""From other set-ups: an Accelerate FSDP1 configuration, an optimizer made before sharding, earlier versions."""
