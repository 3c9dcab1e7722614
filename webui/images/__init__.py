"""The image workbench: a grid of images with a caption box beneath each, used by New training and the Dataset page.

`panel` makes the component; static/images.js draws the workbench in it and calls the routes of `routes`. `listing`
reads what the grid shows of a folder, `captions` saves and undoes, `captioning` has the models for automatic captions
and their jobs, `uploading` takes files, folders and archives, and `tasks` runs what takes longer than a request.
"""

from .panel import make_panel

__all__ = ["make_panel"]
