"""The demo model in the package is what the converter makes of demo/."""

from pathlib import Path

from colibri.cbi import CbiFile
from colibri.convert import convert
from colibri.runtime.engine import demo_model_path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_packaged_demo_is_the_q4_conversion_of_the_checkpoint(tmp_path: Path) -> None:
    convert(ROOT / "demo", tmp_path / "demo.cbi", weights="q4")
    with CbiFile.open(tmp_path / "demo.cbi") as made, CbiFile.open(demo_model_path()) as shipped:
        assert shipped.program == made.program
        assert [(t.name, t.sha256) for t in shipped.tensors] == [(t.name, t.sha256) for t in made.tensors]
        assert [[e.sha256 for e in s.experts] for s in shipped.expert_sets] == [
            [e.sha256 for e in s.experts] for s in made.expert_sets
        ]
        assert (shipped.tokenizer_json, shipped.chat_template) == (made.tokenizer_json, made.chat_template)
        assert shipped.settings == made.settings
        shipped.verify_digests()
