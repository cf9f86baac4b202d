"""Runs the Triton kernels through the interpreter where there is no GPU; set before anything decorates a kernel."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
