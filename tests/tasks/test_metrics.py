"""Metrics against scikit-learn, seqeval, rouge-score and sacrebleu, and against results of the official scripts.

The scripts are evaluate-v2.0.py of SQuAD 2.0 and evaluate-v1.0.py of CoQA; on 300 random files every digit agreed.
"""

import collections
import importlib.util
import random

import numpy as np
import pytest
import sacrebleu
import seqeval.scheme
import sklearn.metrics
from rouge_score.rouge_scorer import RougeScorer
from seqeval.metrics import f1_score, precision_score, recall_score
from seqeval.scheme import Entities

from jaxlm.data.labelled import Record
from jaxlm.errors import UserError
from jaxlm.tasks import metrics
from jaxlm.tasks.answers import Answers, leave_one_out
from jaxlm.tasks.base import Answer
from jaxlm.tasks.tagging import Tagging


@pytest.mark.parametrize("labels", [("0", "1"), ("a", "b", "c"), tuple("abcdefghijkl"), ("only",)])
def test_classes_as_scikit_learn(labels):
    draw = random.Random(len(labels))
    for count in (1, 7, 40):
        gold, own = ([draw.choice(labels) for _ in range(count)] for _ in range(2))
        assert metrics.accuracy(own, gold) == pytest.approx(sklearn.metrics.accuracy_score(gold, own))
        average = {"average": "binary", "pos_label": "1"} if len(labels) == 2 else {"average": "macro"}
        wanted = sklearn.metrics.f1_score(gold, own, zero_division=0, **average)
        found = metrics.class_metrics(own, gold, labels)
        assert found["f1"] == pytest.approx(wanted)
        assert found["matthews"] == pytest.approx(sklearn.metrics.matthews_corrcoef(gold, own))


def test_figures_of_each_class_as_scikit_learn():
    draw = random.Random(1)
    labels, names = ("c", "a", "b"), ["c", "a", "b", "new"]  # training had not seen the last one
    gold, own = [draw.choice(names) for _ in range(50)], [draw.choice(labels) for _ in range(50)]
    found = metrics.class_details(own, gold, labels)
    assert list(found["classes"]) == names
    assert found["confusion"] == sklearn.metrics.confusion_matrix(gold, own, labels=names).tolist()
    wanted = sklearn.metrics.precision_recall_fscore_support(gold, own, labels=names, zero_division=0)
    for number, name in enumerate(names):
        figures = [found["classes"][name][figure] for figure in ("precision", "recall", "f1", "rows")]
        assert figures == pytest.approx([column[number] for column in wanted], abs=1e-6)
    written = metrics.class_details(["a", "something else"], ["a", "a"], ("a", "b"))  # by a model that writes
    assert written["classes"]["a"] | {"f1": 0} == {"precision": 1.0, "recall": 0.5, "f1": 0, "rows": 2}
    assert written["confusion"] == [[1, 0], [0, 0]]


@pytest.mark.parametrize("count", [1, 5, 60])
def test_sets_of_labels_as_scikit_learn(count):
    """One label is never predicted, one never gold, one neither, and training had not seen the last one."""
    draw = random.Random(count)
    labels, names = ("c", "a", "b", "gold", "own", "none"), ["c", "a", "b", "gold", "own", "none", "new"]
    sets = {"gold": ["c", "a", "b", "gold", "new"], "own": ["c", "a", "b", "own"]}
    gold, own = (
        [[name for name in sets[side] if draw.random() < 0.4] for _ in range(count)] for side in ("gold", "own")
    )
    gold[0] = [*gold[0], "new"] if "new" not in gold[0] else gold[0]
    tables = [[[name in row for name in names] for row in rows] for rows in (gold, own)]
    found = metrics.multi_label_metrics(own, gold, labels)
    assert next(iter(found)) == "micro_f1"
    for average in ("micro", "macro"):
        wanted = sklearn.metrics.precision_recall_fscore_support(*tables, average=average, zero_division=0)
        figures = [found[f"{average}_{figure}"] for figure in ("precision", "recall", "f1")]
        assert figures == pytest.approx(wanted[:3])
    assert found["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(*tables))
    wanted = sklearn.metrics.precision_recall_fscore_support(*tables, average=None, zero_division=0)
    classes = metrics.multi_label_details(own, gold, labels)["classes"]
    assert list(classes) == names
    for name, *figures in zip(names, *wanted, strict=True):
        assert list(classes[name].values()) == pytest.approx(figures, abs=1e-6)


def test_the_best_threshold_is_the_best_of_all():
    """Every threshold that changes the predictions is tried; equal scores stay together."""
    draw = np.random.default_rng(0)
    for rows, digits in ((1, 1), (3, 1), (8, 1), (8, 2), (20, 6)):
        scores, golds = draw.random((rows, 4)).round(digits), draw.random((rows, 4)) < 0.3
        found = metrics.best_threshold(scores, golds)

        def f1(threshold, scores=scores, golds=golds):
            return sklearn.metrics.f1_score(golds, scores > threshold, average="micro", zero_division=0)

        values = np.unique([0.0, *scores.ravel(), 1.0])
        tried = [0.5, *((values[1:] + values[:-1]) / 2)]
        assert f1(found) == pytest.approx(max(map(f1, tried)))
        assert abs(found - 0.5) <= min(abs(t - 0.5) for t in tried if f1(t) > f1(found) - 1e-9) + 1e-9
    assert metrics.best_threshold(np.array([[0.9, 0.2]]), np.array([[True, False]])) == 0.5
    assert metrics.best_threshold(np.array([[0.9, 0.2], [0.4, 0.3]]), np.array([[1, 0], [1, 0]]) > 0) == 0.35
    for scores in ([[0.9, 0.2]], [[0.3, 0.2], [0.1, 0.05]]):  # no row has a label: nothing is as good as anything
        assert metrics.best_threshold(np.array(scores), np.zeros((len(scores), 2), bool)) == 0.5


def test_no_rows_have_no_figures_but_zeros():
    for labels in ((), ("a", "b"), ("a", "b", "c")):
        assert metrics.class_metrics([], [], labels) == {"accuracy": 0.0, "f1": 0.0, "matthews": 0.0}
    details = metrics.class_details([], [], ("a", "b"))
    assert details["confusion"] == [[0, 0], [0, 0]] and details["classes"]["b"]["f1"] == 0.0
    assert set(metrics.multi_label_metrics([], [], ("a",)).values()) == {0.0}
    assert metrics.multi_label_details([], [], ("a",))["classes"]["a"]["f1"] == 0.0
    assert metrics.relation_metrics([], [], "NA") == {
        "accuracy": 0.0, "macro_precision": 0.0, "macro_recall": 0.0, "macro_f1": 0.0, "micro_precision": 1.0,
        "micro_recall": 0.0, "micro_f1": 0.0,
    }


def test_correlations():
    gold = [0.0, 1.0, 2.5, 5.0]
    found = metrics.correlations([2.0, 4.0, 7.0, 12.0], gold)
    assert found == pytest.approx({"pearson": 1.0, "spearman": 1.0})
    assert metrics.correlations([1.0, 4.0, 9.0, 100.0], gold)["spearman"] == 1.0
    assert metrics.correlations([3.0, 3.0, 3.0, 3.0], gold) == {"pearson": 0.0, "spearman": 0.0}
    assert metrics.correlations([1.0], [2.0]) == metrics.correlations([], []) == {}


def marked(draw, scheme, kinds):
    """Return the tags of a sentence in a scheme, written from its definition."""
    pieces, previous = [], None
    for _ in range(draw.randrange(1, 6)):
        kind, size = draw.choice([None, *kinds]), draw.randrange(1, 4)
        pieces.append((kind, size, kind == previous))
        previous = kind
    tags = []
    for number, (kind, size, is_adjacent) in enumerate(pieces):
        is_followed = number + 1 < len(pieces) and pieces[number + 1][2]
        prefixes = ["I"] * size
        if scheme == "IOB2" or scheme in ("IOBES", "BILOU") or (scheme == "IOB1" and is_adjacent):
            prefixes[0] = "B"
        if scheme in ("IOE2", "IOBES", "BILOU") or (scheme == "IOE1" and is_followed):
            prefixes[-1] = "L" if scheme == "BILOU" else "E"
        if scheme in ("IOBES", "BILOU") and size == 1:
            prefixes = ["U" if scheme == "BILOU" else "S"]
        tags += [f"{prefix}-{kind}" if kind else "O" for prefix in prefixes]
    return tags


@pytest.mark.parametrize("name", ["IOB1", "IOB2", "IOE1", "IOE2", "IOBES", "BILOU"])
def test_entities_as_seqeval_strict_in_the_scheme_of_the_gold_tags(name):
    draw = random.Random(0)
    scheme = getattr(seqeval.scheme, name)
    tags = ["O", *(f"{p.name}-{kind}" for p in scheme.allowed_prefix for kind in ("PER", "LOC") if p.name != "O")]
    for round in range(60):
        gold = [marked(draw, name, ("PER", "LOC", "A-B")[: 1 + round % 3]) for _ in range(20)]
        own = [[draw.choice(tags) if draw.random() < 0.3 else tag for tag in row] for row in gold]
        if round % 3 == 0:  # sequences that are valid in no scheme
            own = [[draw.choice(tags) for _ in row] for row in gold]
        found = metrics.entity_f1(own, gold, tags)
        for figure, theirs in (("f1", f1_score), ("precision", precision_score), ("recall", recall_score)):
            assert found[figure] == pytest.approx(theirs(gold, own, mode="strict", scheme=scheme, zero_division=0))
        assert ("conlleval_f1" in found) == (name in ("IOB1", "IOB2"))
        if "conlleval_f1" in found:
            assert found["conlleval_f1"] == pytest.approx(f1_score(gold, own, zero_division=0))
        assert metrics.entity_f1(gold, gold)["f1"] == 1.0
        # Gold tags with errors of annotators, too.
        assert metrics.entities(tuple(own[0]), metrics.SCHEMES[name]) == {
            (entity.start, entity.end - 1, entity.tag) for entity in Entities([own[0]], scheme).entities[0]
        }
    assert metrics.entity_f1([["O"]], [["O"]], tags)["f1"] == 0.0


def test_tags_that_mark_no_entities_are_refused_as_entities():
    words = Record("0", "f:1", {"words": ["a", "b"], "tags": ["NOUN", "I"]}, ("a b",))
    assert Tagging().with_labels([words]).score([["I"]], [Answer(["I"], {})]) == {"accuracy": 1.0}
    for labels in (("B-X", "M-X", "O"), ("S-X", "U-X"), ("NOUN",), ("",)):
        with pytest.raises(UserError, match=r"do not mark entities in IOB2, .*BILOU; set --objective.metric accuracy"):
            Tagging(metric="entities", labels=labels).with_labels([words])
    marked = Tagging().with_labels([words._replace(values={"words": ["a", "b"], "tags": ["U-X", "O"]})])
    answers = [Answer(["U-X", "NOUN"], {})]  # a model that writes may answer anything
    figures = marked.score([["U-X", "O"]], answers)
    assert figures == {"accuracy": 0.5, "precision": 1.0, "recall": 1.0, "f1": 1.0}
    assert next(iter(figures)) == "f1"  # by which --sweep chooses


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    metrics.require_packages(["accuracy"])
    with pytest.raises(UserError, match=r"BLEU needs the package sacrebleu; .* `pip install -e '\.\[eval\]'`"):
        metrics.require_packages(["accuracy", "bleu"])


def test_texts_as_rouge_score_and_sacrebleu():
    own, gold = ["the cats sat down", ""], [["a cat sat on a mat", "the cat sat"], ["nothing"]]
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    wanted = [max(scorer.score(g, p)["rougeL"].fmeasure for g in golds) for p, golds in zip(own, gold, strict=True)]
    assert metrics.rouge(own, gold)["rougeL"] == pytest.approx(sum(wanted) / 2)
    same = ["Je ne suis pas sûr de pouvoir me fier à lui."]
    assert metrics.bleu(same, [same]) == pytest.approx(100)
    other = ["Je ne suis pas certain de pouvoir lui faire confiance."]
    assert metrics.bleu(same, [other]) == pytest.approx(sacrebleu.corpus_bleu(same, [other]).score)
    russian, thai = "Пошёл сильный дождь, и мы ушли", "วันนี้ฝนตกหนักเราจึงไป"
    chinese = "今天下了很大的雨，我们和列奥纳多・达芬奇走了"  # one character of katakana
    assert metrics.rouge([russian, "x"], [[russian], [russian]])["rouge2"] == pytest.approx(0.5)
    assert metrics.rouge(["сильный дождь"], [[russian]])["rouge1"] == pytest.approx(2 * 2 / (2 + 6))
    assert metrics.rouge(["Hän", "Tämä"], [["Tämän"], ["tämä!"]])["rouge1"] == 0.5
    english = "He had coffee at the café in Zürich before the long trip " + "and then went on with the others " * 50
    assert metrics.rouge(["going to a café"], [[english]]) == {
        name: score.fmeasure for name, score in RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True).score(
            english, "going to a café").items()}
    for text, name in ((russian, "13a"), (chinese, "zh"), (thai, "char")):
        wrong = text[:5] + "x" + text[6:]
        assert metrics.bleu([wrong], [[text]]) == pytest.approx(
            sacrebleu.corpus_bleu([wrong], [[text]], tokenize=name).score
        )
        assert metrics.bleu([wrong], [[text]]) > 20


def test_f1_of_texts_without_spaces_counts_characters():
    """As the script of MLQA for Chinese; 3 of 5 and of 3 characters are common."""
    assert metrics.text_metrics(["exact_match", "f1"], ["東京都です"], [["東京都"]]) == {"exact_match": 0, "f1": 0.75}
    assert metrics.text_metrics(["f1"], ["Tokyo is"], [["Tokyo", "東京"]]) == {"f1": pytest.approx(2 / 3)}
    for written, gold in (("東京。", "東京"), ("दिल्ली।", "दिल्ली"), ("«Oui»", "oui")):
        assert metrics.text_metrics(["exact_match", "f1"], [written], [[gold]]) == {"exact_match": 1, "f1": 1}


@pytest.mark.parametrize(("written", "gold", "score"), [
    ("1", "-1", 0), ("+", "-", 0), ("314", "3.14", 0), ("", "A", 0), ("-1", "-1", 1), (" 3.14", "3.14 ", 1),
    ("1999.", "1999", 1), ("$5", "5", 1), ("42%", "42", 1), ("1,000", "1000", 1), ("a", "A", 1), ("+", "+", 1),
    ("A", "A", 1), ("the Cat!", "cat", 1), ("", "", 1), ("the 42", "42", 1), ("a 5", "5", 1), ("the", "a", 0),
])
def test_texts_without_letters_are_compared_as_they_stand(written, gold, score):
    assert metrics.text_metrics(["exact_match", "f1"], [written], [[gold]]) == {"exact_match": score, "f1": score}


ROWS = [  # human answers, best span, score of no answer
    (["The 10th century", "10th century"], "10th-century", -2.0),
    (["Denmark, Iceland and Norway"], "Iceland and the Norway!", -1.0),
    ([], "Rollo", 0.5),
    (["cat"], "", -3.0),
    (["the", "cat"], "a cat", 1.5),
    ([], "x", -0.5),
]


def test_answers_as_the_scripts_of_squad():
    golds = [golds for golds, _, _ in ROWS]
    found = [Answer("" if null > 0 else best, {"best": best, "null": null}) for _, best, null in ROWS]
    scores = Answers(no_answer=True).score(golds, found)
    assert scores == pytest.approx({
        "exact_match": 0.16666667, "f1": 0.30952381, "has_answer_exact_match": 0.0, "has_answer_f1": 0.21428571,
        "no_answer_exact_match": 0.5, "no_answer_f1": 0.5, "best_exact_match": 0.33333333, "best_f1": 0.47619048,
        "best_f1_threshold": -1.0, "best_exact_match_threshold": -4.0,
    })
    empty = [Answer("", {"best": "", "null": -3.0}), Answer("x", {"best": "x", "null": -2.0})]
    assert Answers(no_answer=True).score([[], ["x"]], empty)["best_f1"] == 1.0  # an empty span costs nothing
    answered = Answers(no_answer=True).score(golds[:2], found[:2])
    assert not any(name.startswith("no_answer") for name in answered) and "has_answer_f1" in answered
    plain = Answers().score(golds, [Answer(best, {}) for _, best, _ in ROWS])
    assert plain == pytest.approx({"exact_match": 0.16666667, "f1": 0.30952381})


@pytest.mark.parametrize("units", ["words", "characters"])
def test_gold_answers_without_words_as_the_scripts_of_squad_1_1_and_mlqa(units):
    """Their rules, written out: all gold answers count, and texts without a word in common have F1 0."""
    normalize = {"words": metrics.normalize_answer, "characters": metrics.split_characters}[units]
    draw, texts = random.Random(0), ["the", "", "!", "a cat", "The cat!", "cat dog", "dog", "the dog a"]

    def f1(text, gold):
        text, gold = normalize(text).split(), normalize(gold).split()
        same = sum((collections.Counter(text) & collections.Counter(gold)).values())
        return 2 * same / (len(text) + len(gold)) if same else 0

    for _ in range(300):
        text, golds = draw.choice(texts), draw.choices(texts, k=draw.randrange(1, 4))
        assert Answers(units=units).row_figures(golds, Answer(text, {})) == pytest.approx({
            "exact_match": float(any(normalize(text) == normalize(gold) for gold in golds)),
            "f1": max(f1(text, gold) for gold in golds),
        })
    # Version 2.0 leaves such gold answers out, and a question with no other has none.
    assert Answers(no_answer=True).row_figures(["the"], Answer("!", {})) == {"exact_match": 1.0, "f1": 1.0}
    assert Answers(no_answer=True).row_figures(["the", "cat"], Answer("", {})) == {"exact_match": 0.0, "f1": 0.0}


def test_answers_in_characters_as_the_script_of_mlqa():
    """The figures are those of its mlqa_evaluation_v1.py for zh; it leaves kana together, which have no spaces too."""
    rows = [("北京大学。", ["北京的大学", "大学"], 0.888888888888889), ("the 中国", ["中国"], 0.8),
            ("2008年 8月8日", ["8月8日", "2008 年8月"], 0.8), ("iPhone 6", ["《iPhone》"], 2 / 3),
            ("東京タワー", ["タワー"], 0.75)]
    task, words = Answers(units="characters"), Answers()
    for text, golds, figure in rows:
        found = {"exact_match": 0.0, "f1": pytest.approx(figure)}
        assert task.row_figures(golds, Answer(text, {})) == task.score([golds], [Answer(text, {})]) == found
        assert words.row_figures(golds, Answer(text, {})) != found
    assert task.row_figures(["《北京》"], Answer("北 京", {})) == {"exact_match": 1.0, "f1": 1.0}


def test_conversations_leave_one_gold_answer_out():
    """Each human answer is left out in turn, as when humans are scored."""
    golds = ["white", "white", "a white kitten", "grey"]
    assert leave_one_out(metrics.exact_match, "White.", golds) == 1.0
    assert leave_one_out(metrics.exact_match, "grey", golds) == 0.75
    assert leave_one_out(metrics.token_f1, "white kitten", ["white kitten", "no"]) == 0.5
    assert leave_one_out(metrics.exact_match, "yes", ["Yes"]) == 1.0
