"""Arguments and options that several commands share."""

import typer

CONFIG = typer.Argument(..., metavar="CONFIG", help="Config file of the job.")
RUN = typer.Argument(..., metavar="RUN", help="Run folder.")
SET = typer.Option([], "--set", metavar="KEY=VALUE", help="Setting to override, such as train.steps=500. Repeatable.")
JSON = typer.Option(False, "--json", help="Print JSON.")
DTYPE = typer.Option("", help="Dtype of the output: bf16, fp16 or fp32. Default: that of the files.")
FOLDER = typer.Argument(..., metavar="FOLDER", help="Folder of images with captions beside them.")
