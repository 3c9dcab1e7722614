"""Verifies that an exported LoRA file does what training did."""

from ..families import read_family_name
from .deltas import compute_delta_error, compute_relative_error
from .file_checks import HEADER_KEYS, UNNAMED_ARCHITECTURE
from .merging import MOSTLY_LOST, measure_survival
from .pipeline import build_clean_pipeline, find_loaded_layers, load
from .reference import Previews, Probe, Reference, compute_psnr, make_probe, predict, save_probe
from .report import Report
from .verify import check, check_file

__all__ = [
    "HEADER_KEYS",
    "MOSTLY_LOST",
    "Previews",
    "Probe",
    "Reference",
    "Report",
    "UNNAMED_ARCHITECTURE",
    "check",
    "check_file",
    "build_clean_pipeline",
    "compute_delta_error",
    "read_family_name",
    "load",
    "find_loaded_layers",
    "make_probe",
    "predict",
    "compute_psnr",
    "compute_relative_error",
    "save_probe",
    "measure_survival",
]
