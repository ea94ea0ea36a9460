"""What every test file needs to be true before it imports triton."""

import os

import torch

if not torch.cuda.is_available():
    # triton.language is interpreted or compiled, decided at its first import.
    os.environ["TRITON_INTERPRET"] = "1"

# Figures are drawn, never shown.
os.environ["MPLBACKEND"] = "Agg"
