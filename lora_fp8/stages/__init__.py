"""The stages of a job, one file each; `train.run` calls them in order.

download, cache, fit_memory, load, resume, preflight; in each step: step, milestones (previews, validate,
held_out); last: finish.
`session` is what all of them share.
"""
