"Every chapter runs from top to bottom: its cells are documentation and tests."
from pathlib import Path

import pytest

root = Path(__file__).parent.parent
notebooks = sorted([*root.glob("nbs/*.ipynb"), *root.glob("kernels/*.ipynb")])


@pytest.mark.parametrize("path", notebooks, ids=lambda p: p.name)
def test_notebook(path):
    from nbdev.config import get_config
    from nbdev.test import test_nb
    done, seconds = test_nb(path, skip_flags=get_config().tst_flags.split(), basepath=root)
    assert done
