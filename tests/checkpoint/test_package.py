from __future__ import annotations

import subprocess
import sys


def test_the_checkpoint_package_imports_no_torch():
    code = "import sys, minifloat.checkpoint; sys.exit('torch' in sys.modules or 'safetensors' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
