"""README says which ops each language has, as the packages' files do."""

import importlib.util
from pathlib import Path

from liger_core.contract import ops

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("languages", ROOT / "tools" / "languages.py")
assert _spec is not None
assert _spec.loader is not None
languages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(languages)


def test_readme_is_current() -> None:
    text = languages.README.read_text("utf-8")
    assert text == languages.written(text, ROOT), "run tools/languages.py"


def test_a_missing_op_is_named(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "liger-acme"
    folder = package / "src" / "liger_acme" / "ops"
    folder.mkdir(parents=True)
    (package / "pyproject.toml").write_text(
        '[project]\n[project.entry-points."liger.backends"]\nacme = "liger_acme:backend"\n'
    )
    for op in ops.keys() - {"rope"}:
        (folder / f"{op}.py").touch()
    assert f"| acme | {len(ops) - 1} of {len(ops)}, not `rope` |" in languages.table(tmp_path)
