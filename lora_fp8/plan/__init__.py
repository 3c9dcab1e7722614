"""The Plan of a job: everything that is known before a weight is loaded.

`check` and `estimate` are views of it, and `train` starts from it.
"""
