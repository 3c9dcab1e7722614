"""The parts of training around the loop: optimizer, memory, trained text encoders, checkpoints."""
