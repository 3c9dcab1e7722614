"""Arguments and options that several commands have."""

import typer

SET = typer.Option([], "--set", metavar="KEY=VALUE", help="Override one setting, such as train.steps=500. Repeatable.")
JSON = typer.Option(False, "--json", help="Answer in JSON.")
DTYPE = typer.Option("", help="bf16, fp16 or fp32; empty is that of the files.")
FOLDER = typer.Argument(..., metavar="FOLDER", help="Folder of pictures with captions beside them.")
