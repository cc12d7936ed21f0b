"""Declares torchvision's operators, so that torchvision can be imported where they are built for another torch.

Python imports this module at its start, where its folder is on PYTHONPATH; vLLM imports models in processes of its own.
An operator that is called fails. The names are those that torchvision gives shapes to when it is imported.
"""

import importlib.util
import re
from pathlib import Path

_REGISTERED = re.compile(r'(?:register_meta|register_fake)\(\s*"(?:torchvision::)?(\w+)"')

_spec = importlib.util.find_spec("torchvision")
if _spec is not None and _spec.origin is not None:
    import torch

    _library = torch.library.Library("torchvision", "DEF")
    _source = Path(_spec.origin).with_name("_meta_registrations.py").read_text()
    for _name in sorted(set(_REGISTERED.findall(_source))):
        _library.define(f"{_name}() -> Tensor")
