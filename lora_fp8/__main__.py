"""`python -m lora_fp8 <command>`: the same as `lora-fp8 <command>`, where its script is not on the path."""

from .cli import run_program

if __name__ == "__main__":
    run_program()
