"""What is worth imitating, and what a teacher's word comes to."""

import json
from pathlib import Path

import numpy as np
import pytest

from lehr.core.batch import Sample
from lehr.core.errors import ConfigError
from lehr.core.trace import Sampling, Segment
from lehr.domains.catalogue import open_domain
from lehr.model.checkpoint import save_model
from lehr.model.tiny import tiny_decoder
from lehr.model.tokenizer import ByteTokenizer
from lehr.model.vocabulary import require_same_vocabulary
from lehr.pipeline.choosing import Answered, Rule, choose, likeness
from lehr.pipeline.far_tasks import far_tasks
from lehr.pipeline.recipe import DistillStage, RejectStage, Stage
from lehr.pipeline.stages.distill import _finished, token_gaps


def answer(task: str, value: float, text: str, *, passed: bool | None = None) -> Answered:
    zeros = np.zeros(1, np.float32)
    sample = Sample(np.zeros(1, np.int32), np.ones(1, np.bool_), zeros, zeros, trace_id=text)
    return Answered(task, value, value >= 1 if passed is None else passed, tuple(text.encode()), (sample,))


def kept(answers: list[Answered], **rule: object) -> list[str]:
    return [s.trace_id for s in choose(answers, Rule(**rule)).samples]  # type: ignore[arg-type]


def test_of_what_passed_the_best_are_kept_and_each_text_once() -> None:
    answers = [
        answer("a", 0.7, "good enough", passed=True),
        answer("a", 1.0, "perfect"),
        answer("a", 1.0, "perfect"),
        answer("a", 0.2, "bad"),
        answer("b", 0.0, "worse"),
        answer("c", 1.0, "perfect"),
    ]
    assert kept(answers, keep_per_task=2) == ["perfect", "good enough", "perfect"]
    assert kept(answers, keep_per_task=1) == ["perfect", "perfect"]
    assert kept(answers, keep_per_task=9, min_value=0.8) == ["perfect", "perfect"]
    chosen = choose(answers, Rule(keep_per_task=1))
    assert (chosen.answers, chosen.failed, chosen.alike, chosen.crowded) == (2, 2, 1, 1)


def test_best_of_n_also_takes_what_came_nearest_where_none_passed() -> None:
    answers = [answer("a", 0.2, "x"), answer("a", 0.6, "y"), answer("b", 0.3, "z"), answer("b", 0.3, "w")]
    assert kept(answers) == []
    assert kept(answers, keep="best", keep_per_task=2) == ["y"], "equal attempts say nothing about better"
    assert kept(answers, keep="best", min_value=0.7) == []


def test_near_duplicates_count_as_one_only_where_that_is_asked_for() -> None:
    long = "the quick brown fox jumps over the lazy dog"
    answers = [answer("a", 1, long), answer("a", 1, long + "."), answer("a", 1, "something else altogether")]
    assert len(kept(answers, keep_per_task=3)) == 3
    assert kept(answers, keep_per_task=3, near_duplicate=0.9) == [long, "something else altogether"]
    assert likeness((1, 2, 3), (1, 2, 3)) == 1 and likeness((1, 2, 3), (1, 2, 4)) == 0
    assert 0.9 < likeness(tuple(long.encode()), tuple((long + ".").encode())) < 1


def test_no_task_is_taken_by_two_stages_that_sample_answers() -> None:
    stages: list[Stage] = [
        RejectStage(name="one", tasks=3),
        DistillStage(name="on", teacher="t", method="on_policy"),
        DistillStage(name="two", teacher="t", tasks=4),
        RejectStage(name="three", tasks=2),
    ]
    domains = {name: open_domain(name, ()) for name in ("code/functions", "terminal/files")}
    taken = [
        (task.domain.card.id, task.index)
        for name, count in (("one", 3), ("two", 4), ("three", 2))
        for task in far_tasks(domains, stages, name, count)
    ]
    assert len(taken) == len(set(taken)) == 9
    assert min(index for _, index in taken) > 100


def test_a_tokens_reward_is_how_much_likelier_the_teacher_finds_it() -> None:
    own = np.array([False, False, True, True])
    raw = np.array([0, 0, -1.0, -2.0], np.float32)
    shape = np.zeros(4, np.float32)
    segment = Segment(
        np.arange(4, dtype=np.int32),
        own,
        shape,
        raw,
        shape + 1,
        np.zeros(4, np.int64),
        np.array([2], np.int32),
        Sampling(),
    )
    scored = np.array([-9.0, -0.5, -3.0], np.float32)
    np.testing.assert_allclose(token_gaps(segment, scored), [0, 0, 0.5, -1.0])


def test_answers_are_not_asked_for_again_and_a_torn_line_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "distill.jsonl"
    assert _finished(path) == set()
    line = json.dumps({"messages": [], "group": "distill-00001"}) + "\n"
    path.write_text(line + '{"messages": [], "gro')
    assert _finished(path) == {"distill-00001"}
    assert path.read_text() == line


def test_another_vocabulary_is_refused_with_both_names(tmp_path: Path) -> None:
    class Other(ByteTokenizer):
        def save(self, folder: Path) -> None:
            from tokenizers import Tokenizer, models

            Tokenizer(models.WordLevel({"<|im_end|>": 0, "a": 1}, "a")).save(str(folder / "tokenizer.json"))
            (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')

    for name, tokenizer in (("student", ByteTokenizer()), ("same", ByteTokenizer()), ("other", Other())):
        save_model(tiny_decoder(), tmp_path / name, tokenizer)
    require_same_vocabulary(tmp_path / "student", tmp_path / "same")
    with pytest.raises(
        ConfigError, match=r"student \(259 tokens\) and of its teacher .*other \(2\) differ: id 0"
    ):
        require_same_vocabulary(tmp_path / "student", tmp_path / "other")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"teacher": "openai:x@http://127.0.0.1/v1", "method": "on_policy"}, "does not tell how likely"),
        ({"teacher": "tiny", "api": {"retries": 1}}, "settings of a model behind an API"),
    ],
)
def test_a_teacher_that_cannot_do_it_is_refused_at_once(fields: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        DistillStage(**fields)  # type: ignore[arg-type]
