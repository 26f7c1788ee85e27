# SPDX-License-Identifier: Apache-2.0
"""`check` of Hugging Face's models agrees with a compilation in strict mode.

The models are small, with random weights, and give their own loss.
"""

from __future__ import annotations

import pytest
import torch

from ipufit import UnsupportedError
from tests.check.test_check_models import runs
from tests.reference import compiled

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ipufit.IpufitWarning"),
    pytest.mark.filterwarnings("ignore:The torchvision.datapoints"),  # it looks there
]

ROWS, LENGTH, WORDS = 4, 16, 40
LAYERS = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
ENCODER = {**LAYERS, "vocab_size": WORDS, "pad_token_id": None}
IMAGES = {**LAYERS, "image_size": 16, "patch_size": 8}
T5 = {
    "vocab_size": WORDS,
    **{"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    "decoder_start_token_id": 0,
    "use_cache": False,
}
IS_NEW = int(transformers.__version__.partition(".")[0]) >= 5
HAS_FUSED = IS_NEW or transformers.utils.is_torch_sdpa_available()
# Earlier versions make these masks of a mask of tokens themselves.
ADDED = torch.zeros(ROWS, 1, 1, LENGTH) if IS_NEW else torch.ones(ROWS, LENGTH)
CAUSAL = torch.full((LENGTH, LENGTH), -10000.0).triu(1).expand(ROWS, 1, -1, -1)
CAUSAL = CAUSAL if IS_NEW else torch.ones(ROWS, LENGTH)


def words():
    return torch.randint(5, WORDS, (ROWS, LENGTH))


def labels():
    return torch.randint(0, 2, (ROWS,))


def network(kind, purpose, attn_implementation="eager", **settings):
    settings["attn_implementation"] = attn_implementation
    config = getattr(transformers, f"{kind}Config")(**settings)
    return getattr(transformers, f"{kind}For{purpose}")(config)


def encoder(kind, mask=ADDED, attention="eager", **settings):
    def case():
        settings_of_all = {**ENCODER, "attn_implementation": attention, **settings}
        module = network(kind, "SequenceClassification", **settings_of_all)
        x = {"input_ids": words(), "labels": labels()}
        return module, x if mask is None else {**x, "attention_mask": mask}

    return case


def writer(mask=CAUSAL, attention="eager"):
    def case():
        config = transformers.GPT2Config(
            vocab_size=WORDS,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=LENGTH,
            use_cache=False,
            attn_implementation=attention,
        )
        tokens = words()
        x = {"input_ids": tokens, "labels": tokens.clone()}
        if mask is not None:
            x["attention_mask"] = mask
        return transformers.GPT2LMHeadModel(config), x

    return case


def images(kind, **settings):
    def case():
        module = network(kind, "ImageClassification", num_labels=2, **settings)
        return module, {"pixel_values": torch.rand(ROWS, 3, 16, 16), "labels": labels()}

    return case


def translator():
    module = network("T5", "ConditionalGeneration", **T5)
    return module, {"input_ids": words(), "labels": words()}


def sounds():
    module = network(
        *("Wav2Vec2", "SequenceClassification"),
        **LAYERS,
        conv_dim=(8, 8),
        conv_stride=(5, 4),
        conv_kernel=(10, 5),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=8,
        apply_spec_augment=False,
        layerdrop=0.0,
    )
    return module, {"input_values": torch.rand(ROWS, 400), "labels": labels()}


ONES = torch.ones(ROWS, LENGTH, dtype=torch.int64)
CASES = {
    "BERT": encoder("Bert"),
    "DistilBERT": encoder("DistilBert", dim=16, n_layers=2, n_heads=2, hidden_dim=32),
    "GPT-2": writer(),
    "T5": translator,
    "ViT": images("ViT", **IMAGES),
    "ConvNeXt": images("ConvNext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    "Wav2Vec2": sounds,
    "BERT, fused attention": encoder("Bert", attention="sdpa"),
    "BERT, a mask of tokens": encoder("Bert", ONES),
    "BERT, a mask of tokens, fused attention": encoder("Bert", ONES, "sdpa"),
    "GPT-2, no mask": writer(None),
    "GPT-2, a mask of tokens, fused attention": writer(ONES, "sdpa"),
}
PLAIN = [name for name in CASES if "," not in name]


@pytest.mark.parametrize("name", CASES)
def test_a_check_agrees_with_a_compilation(name, monkeypatch):
    if "fused" in name and not HAS_FUSED:
        pytest.skip("transformers needs a newer torch for fused attention")
    torch.manual_seed(0)
    module, x = CASES[name]()
    model = compiled(module, micro_batch_size=2, optimizer="adamw", loss=None)
    report = model.check(x, batch_size=ROWS)
    if not report.is_refused:
        plan = model.plan(x, batch_size=ROWS)
        unused = [module.get_parameter(name).numel() for name in plan.unused]
        every = sum(parameter.numel() for parameter in module.parameters())
        assert plan.num_parameters + sum(unused) == every
    assert report.is_refused != runs(model, x, None, ROWS, monkeypatch), report
    if name in PLAIN and IS_NEW:
        assert not report.is_refused, report


@pytest.mark.skipif(not IS_NEW, reason="earlier versions don't look at masks")
@pytest.mark.parametrize(
    "name", ["BERT, a mask of tokens", "GPT-2, a mask of tokens, fused attention"]
)
def test_a_mask_whose_values_are_read_is_refused_with_the_way_out(name):
    module, x = CASES[name]()
    model = compiled(module, optimizer="adamw", loss=None)
    with pytest.raises(UnsupportedError, match="attention_mask with four dimensions"):
        model.fit(x, batch_size=2, verbose=0)
    with pytest.raises(UnsupportedError, match="attention_mask with four dimensions"):
        model.predict({n: v for n, v in x.items() if n != "labels"}, verbose=0)
