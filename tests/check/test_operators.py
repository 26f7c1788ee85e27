# SPDX-License-Identifier: Apache-2.0
"""The table of operators is complete in itself, and its page counts it right."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path

import ipufit.emulator.core.rules  # noqa: F401 - adds them to RULES
from ipufit.emulator.core.composed import PARTS
from ipufit.emulator.core.operators import RULES

ROOT = Path(__file__).parents[2]
VERDICTS = {
    "same": "computes what torch does",
    "number": "computes another number",
    "gradient": "computes another gradient",
    "shape": "returns another shape",
    "type": "returns another type",
    "nan": "returns NaN or infinity where torch doesn't, or the reverse",
    "refused": "refuses",
}
ANSWERS = {"has", "reported", "lacks", "strict"}


def rows():
    with (ROOT / "ipufit/emulator/core/operators.tsv").open(
        encoding="utf-8", newline=""
    ) as file:
        how = {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "restval": ""}
        return list(csv.DictReader(file, **how))


def test_each_row_has_a_verdict_a_sentence_and_a_citation():
    for row in rows():
        assert None not in row, row
        assert None not in row.values(), row
        assert row["verdict"] in VERDICTS, row
        assert row["emulator"] in ANSWERS, row
        assert row["operator"], row
        assert bool(row["why"]) == (row["emulator"] == "lacks"), row
        assert row["device"], row
        assert re.search(r"\w\.(cpp|hpp|S|py|inc|yaml)\b|torch ", row["citation"]), row


def test_no_row_stands_twice():
    keys = Counter((row["source"], row["operator"], row["when"]) for row in rows())
    assert [key for key, count in keys.items() if count > 1] == []


def counts():
    """The lines of the page's table: rows by verdict, and what the emulator does."""
    ways = ("has", "reported", "strict", "lacks")
    lines = ["| a device | rows | does so | reported | strict | as torch |"]
    lines.append("|---|---|---|---|---|---|")
    for verdict, words in VERDICTS.items():
        found = Counter(row["emulator"] for row in rows() if row["verdict"] == verdict)
        numbers = [sum(found.values()), *(found[way] for way in ways)]
        lines.append(f"| {words} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


def test_the_page_counts_them():
    assert counts() in (ROOT / "docs/reference/operators.md").read_text("utf-8")


def test_each_rule_is_a_row_that_the_emulator_has():
    rules = {one.row for found in RULES.values() for one in found}
    named = {row["rule"]: row for row in rows() if row["rule"]}
    assert rules == named.keys()
    assert {row["emulator"] for row in named.values()} <= {"has", "reported"}
    assert {row["verdict"] for row in named.values()} <= VERDICTS.keys() - {"same"}


def test_rows_that_warn_can_be_told_from_one_call():
    reported = {one.row for found in RULES.values() for one in found if one.is_reported}
    warned = [row for row in rows() if row["warns"]]
    assert {row["warns"] for row in warned} == {"yes"}
    assert {row["rule"] for row in warned} <= reported
    assert {row["verdict"] for row in warned} <= {"gradient", "nan", "number"}


RECORDED = {
    **{f"max_pool{rank}d": f"max_pool{rank}d_with_indices" for rank in (1, 2, 3)},
    "spline_conv": "spline_basis",
    "data": "getattr setattr",
    "dynamic_slice": "slice_tensor",
    "dynamic_update": "update_tensor",
    "upsample": "interpolate",
    "weight_norm": "_weight_norm",
}
"""Functions that are written by others, which a trace records."""

RECURRENT = {"GRU": "gru", "RNN": "rnn_tanh"}


def functions(row):
    """The functions among a row's names, as they are recorded."""
    for name in row["names"].split(", "):
        first = RECURRENT.get(name, name.split(" ")[0])
        is_words = "in-place" in name or "called on" in name
        if first and not first[0].isupper() and not is_words:
            plain = first.replace("linalg.", "linalg_").rpartition(".")[2]
            yield plain if plain.endswith("__") else plain.rstrip("_")


def test_the_rule_of_a_row_is_one_of_each_of_its_functions():
    names = {}
    for function, rules in RULES.items():
        for rule in rules:
            names.setdefault(rule.row, set()).add(function)
    lacking = {
        (row["rule"], name)
        for row in rows()
        if row["rule"] and "any function in place" not in names[row["rule"]]
        for name in functions(row)
        if name not in PARTS
        and names[row["rule"]].isdisjoint([name, *RECORDED.get(name, "").split()])
    }
    assert lacking == set()


EXCEPTIONS = "Precision.enableFloatingPointExceptions(True) and an input above 88.7"
WORDS = {
    EXCEPTIONS: "overflows",
    "dtype bfloat16 or a complex one, inside the program": "bfloat16-or-complex",
    "such an argument is computed on the device": "as a size, dimension or index of",
    "the view is a slice with a step other than 1": "in-place-step",
    "pipelined and gradientAccumulation is 1": "number of pip",
    "training, automatic loss scaling and no gradient is float16": "fp16 were",
    "training, pipelined, and gradientAccumulation < 2 * stages - 1": "number of pip",
    "inference, pipelined, and deviceIterations < stages": "number of pip",
    "POPTORCH_IPU_MODEL or POPTORCH_SMALL_IPU_MODEL set": "requires hardware but",
    "eps is 0 in a group": "Non-positive eps",
    "alpha or momentum is negative (set in param_groups)": "Negative {",
    "a beta is negative (set in param_groups)": "Negative {",
    "momentum or dampening of a group is negative": "Negative {",
    "nesterov and dampening > 0 (set in param_groups)": "nesterov",
    "an attribute is an empty list": "reads the type of a list from",
    "probabilities of whole numbers, lengths of another shape than [B], or top_paths "
    "above beam_width": "takes floating-point probabilities",
    "the proportion isn't above 0 and at most 1, or the tensor is an input or a "
    "weight": "the proportion must be in (0,1]",
    "the factor is below 1 or doesn't divide the dimension, and the mode isn't "
    "Disabled": "invalid serialisation factor",
    "a list of memory proportions or partials types has another length than there are "
    "convolutions, a proportion isn't above 0 and at most 1, or the cycle back-off "
    "isn't above 0": "convolutions inside; numbers must be",
    "a convolution inside needs the result of another one inside": "compiler never "
    "ends",
}
"""Words of a refusal, or its rule, where the row of a condition has other words."""


def test_a_row_without_a_rule_that_refuses_has_a_refusal():
    sources = [
        path.read_text("utf-8") for path in (ROOT / "ipufit/emulator").rglob("*.py")
    ]
    said = " ".join(re.sub(r'"\s+f?"', "", "\n".join(sources)).split())
    lacking = []
    for row in rows():
        if row["verdict"] == "refused" and row["emulator"] == "has" and not row["rule"]:
            text = re.split(r"(?:refuses|stops)[^:]*: ", row["device"], maxsplit=1)[-1]
            pieces = re.split(r"'|\.\.\.|\([^)]*\)|,|:|;", text)
            words = [piece.strip(" '.") for piece in pieces if len(piece.strip()) > 12]
            words = [WORDS[row["when"]]] if row["when"] in WORDS else words
            if not any(one in said for one in words):
                lacking.append((row["operator"], row["when"], words))
    assert lacking == []


HELD = {
    "aten::rand, randn, normal_, uniform_": (
        "executor/test_device.py",
        "test_every_micro_batch_draws_fresh_numbers",
    ),
    "getPopartOptimizer": (
        "optimizers/test_updates.py",
        "test_adamw_corrects_the_bias_even_if_told_not_to",
    ),
    "whole-number buffers and parameters": (
        "executor/test_device.py",
        "test_integer_buffers_are_compiled_in",
    ),
    "aten::nll_loss_forward": (
        "program/test_losses.py",
        "test_label_smoothing_with_sum_trains_the_part_without",
    ),
    "aten::kl_div": (
        "program/test_losses.py",
        "test_the_mark_of_batchmean_is_on_the_sum",
    ),
    "identity_loss": (
        "program/test_losses.py",
        "test_a_removed_marker_has_one_dimension",
    ),
    "poptorch::dynamic_slice": (
        "ops/test_slices.py",
        "test_it_wraps_for_any_start",
    ),
    "torch.nn.TransformerEncoder": (
        "tracing/test_tracer.py",
        "test_an_encoder_computes_padded_positions_as_on_a_device",
    ),
    "constants": ("operators/test_rows.py", "test_constants_have_32_bits"),
    "types": ("operators/test_rows.py", "test_results_have_32_bits"),
    "aten::to, aten::type_as": ("operators/test_rows.py", "test_results_have_32_bits"),
    "Cast (aten::to, type)": (
        "operators/test_rows.py",
        "test_a_cast_to_whole_numbers_stops_the_gradient",
    ),
    "AdamUpdater, RMSPropUpdater": (
        "optimizers/test_updates.py",
        "test_a_small_eps_is_0_beside_float16_means_of_squares",
    ),
    "Accumulate, AdamUpdater, SGD1AcclUpdate": (
        "optimizers/test_updates.py",
        "test_factors_are_rounded_as_float16_state_is",
    ),
    "Adaptive::Adaptive": (
        "optimizers/test_updates.py",
        "test_a_type_of_rmsprops_second_mean_has_no_effect",
    ),
    "aten::binary_cross_entropy": "binary-cross-entropy",
    "aten::maximum, aten::minimum": "maximum-ties",
    "autodiff": "prelu-gradient",
    "results": "amax-of-all",
}
"""The test of a row without a rule, or the rule of another row that it is, too."""


def test_other_rows_without_a_rule_have_a_test():
    held = {
        row["operator"]
        for row in rows()
        if row["emulator"] in ("has", "reported")
        and not row["rule"]
        and row["verdict"] not in ("same", "refused")
    }
    assert held == HELD.keys()
    known = {rule.row for rules in RULES.values() for rule in rules}
    for place in HELD.values():
        if isinstance(place, str):
            assert place in known
        else:
            file, name = place
            text = (ROOT / "tests/emulator" / file).read_text("utf-8")
            assert f"\ndef {name}(" in text
