"""Datasets of the library reasoning-gym: its own items and scores, splits that never meet."""

from __future__ import annotations

import pickle

import pytest

from jetrl_jax.errors import UserError
from jetrl_jax.tasks.registry import build_task
from tests.sections import task_section

library = pytest.importorskip("reasoning_gym", reason="reasoning-gym (extra tasks) is not installed")


def build(name="chain_sum", seed=0, template="{prompt}", **options):
    options = {"train_size": 60, "eval_size": 20, **options}
    return build_task(
        task_section(kind="reasoning_gym", name=name, prompt_template=template, options=options), seed
    )


@pytest.mark.parametrize(
    "name",
    [
        "chain_sum",
        "spell_backward",
        "countdown",
        "leg_counting",
        "propositional_logic",
        "acre",
        "gsm_symbolic",
    ],
)
def test_reasoning_gym_items_and_scores_are_the_librarys(name):
    task = build(name)
    scorer = library.create_dataset(name, seed=99, size=4)
    assert len(task.train) == 60 and len(task.eval) == 20
    for example in [*task.train[:10], *task.eval[:10]]:
        entry = example.metadata["entry"]
        assert example.prompt == entry["question"] and example.answer == entry["answer"]
        for completion in (example.solution, "no", "", "17", f"{example.solution} and more"):
            assert task.verify(f" {completion}\n", example) == scorer.score_answer(completion, entry)
        if example.solution:
            assert task.verify(example.solution, example) == 1.0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("chain_sum", {}),
        ("leg_counting", {}),
        ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
    ],
)
def test_reasoning_gym_splits_are_disjoint_for_every_seed(name, options):
    held_out = [e.prompt for e in build(name, **options).eval]
    assert len(set(held_out)) == 20
    for seed in (0, 1, 5):
        task = build(name, seed, train_size=300, **options)
        assert [e.prompt for e in task.eval] == held_out
        assert not set(held_out) & {e.prompt for e in task.train}


def test_reasoning_gym_seeds_are_not_shifted_copies():
    first, second = ({e.prompt for e in build(seed=seed, train_size=300).train} for seed in (0, 1))
    assert len(first) > 290 and len(first & second) < 15


def test_reasoning_gym_example_depends_on_index_and_seed_alone():
    task, again = build(seed=2), build(seed=2)
    assert [again.train[i] for i in (40, 3, 11)] == [task.train[i] for i in (40, 3, 11)]


def test_reasoning_gym_answer_tag_and_template():
    task = build(template="{prompt} Answer in <answer> tags.", answer_tag="answer")
    example = task.train[0]
    assert example.prompt.endswith("tags.")
    assert example.solution == f"<answer>{example.answer}</answer>"
    assert task.verify(f"so <answer> {example.answer} </answer> it is", example) == 1.0
    assert task.verify(example.answer, example) == 0.0


def test_reasoning_gym_verifier_pickles_small_and_needs_a_process():
    task = build("countdown")
    task.verify("1", task.train[0])
    content = pickle.dumps(task.verifier())
    assert task.separate_process and len(content) < 1000
    example = task.eval[0]
    assert pickle.loads(content)(example.answer, example) == 1.0


def test_reasoning_gym_says_which_items_depend_on_the_hash_seed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert "PYTHONHASHSEED" in build("ransom_note").notes[0]
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert build("ransom_note").notes == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "chain_sums"}, "unknown dataset: got task.name='chain_sums'.*Did you mean chain_sum"),
        ({"min_term": 3}, "refuses its options: got {'min_term': 3}"),
        ({"min_terms": 9}, "max_terms must be >= min_terms"),
        ({"eval_size": 0}, "task.options.eval_size=0"),
        ({"answer_tag": "<a>"}, "task.options.answer_tag='<a>'"),
        ({"size": 3}, "task.options.size is not free"),
        (
            {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1, "eval_size": 20},
            "too few distinct held-out prompts: got task.options.eval_size=20, found 10 in 160",
        ),
        (
            {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1, "eval_size": 10},
            "every training prompt of chain_sum is held out",
        ),
    ],
)
def test_reasoning_gym_raises_on(arguments, message):
    with pytest.raises(UserError, match=message):
        build(**arguments)
