from __future__ import annotations

import torch

torch.set_num_threads(1)  # operations this small only wait for each other on several threads
