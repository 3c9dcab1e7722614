"""The stages of a job, one file each, in the order that `train` runs them."""
