"""Rows of the IFEval data set itself: all 25 ids, each with a response that follows it and one that does not."""

from __future__ import annotations

from typing import Any

import pytest
from reward_support import completion, outcomes, row

from roll_like import RewardResult
from roll_like.builtin.rewards.ifeval import IFEval, IFEvalConfig
from roll_like.builtin.rewards.ifeval.ids import TRANSLATIONS, translate_ids
from roll_like.builtin.rewards.ifeval.kinds import KINDS, parse_instructions
from roll_like.builtin.rewards.ifeval.language import LANGUAGES, language_of
from roll_like.errors import DataError

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "A cat and a dog.", "A cat."),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": "at least"}, "cat cat cat", "cat"),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": "less than"}, "a cat", "cat cat"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "A category.", "A cat."),
    (
        "keywords:letter_frequency",
        {"letter": "q", "let_frequency": 2, "let_relation": "at least"},
        "Quite quiet.",
        "Quite.",
    ),
    (
        "language:response_language",
        {"language": "de"},
        "Das Haus ist alt und der Garten auch.",
        "The house is old and so is the garden.",
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "less than"},
        "One. Two.",
        "A. Two. Three. Four.",
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "One. Two.", "One."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "One.\n***\nTwo.", "One.\n\nTwo."),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "one two", "one two three"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one two three", "one two"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "well"},
        "One.\n\nWell, two.",
        "Well.\n\nTwo.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [place]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP.S. Love", "Bye."),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n* b", "* a\n* b\n* c"),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "My answer is yes. My answer is no."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and *b*", "*a*"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\na\nSECTION 2\nb",
        "SECTION 1\na",
    ),
    ("detectable_format:json_format", {}, '{"a": 1}', "a: 1"),
    ("detectable_format:title", {}, "<<Joy>>\nText", "Joy\nText"),
    ("combination:two_responses", {}, "One.\n******\nTwo.", "One.\n***\nTwo."),
    ("combination:repeat_prompt", {"prompt_to_repeat": "What is up?"}, "What is up? The sky.", "The sky."),
    ("startend:end_checker", {"end_phrase": "Any questions?"}, "That is it. Any questions?", "Any questions? No."),
    ("startend:quotation", {}, '"All of it."', "None of it."),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "NASA and ESA",
        "NASA and Esa",
    ),
    ("change_case:english_capital", {}, "ALL OF IT.", "All of it."),
    ("change_case:english_lowercase", {}, "all of it.", "All of it."),
    ("punctuation:no_comma", {}, "One and two.", "One, two."),
]


def test_there_are_25_ids_and_each_is_tested() -> None:
    assert len(TRANSLATIONS) == 25
    assert {name for name, *_ in CASES} == set(TRANSLATIONS)


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES)
def test_an_id(name: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    # as Arrow gives it: every key of every instruction, most of them null
    table = {key: None for _, given, _, _ in CASES for key in given} | arguments
    (instruction,) = parse_instructions(translate_ids([name], [table]))
    assert (instruction.follows(good), instruction.follows(bad)) == (True, False)
    assert instruction.kind in KINDS


def test_a_row_of_the_data_set_is_scored_as_it_is() -> None:
    reward = IFEval(IFEvalConfig(min_words=2))
    fields = {
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{}, {"num_words": 4, "relation": "at least"}],
    }
    reward.check_row(row(**fields))
    texts = ("The sea is wide and blue.", "The sea, wide and blue.", "The sea.", "")
    values = [
        out.value
        for out in outcomes(reward, [completion(text, **fields) for text in texts])
        if isinstance(out, RewardResult)
    ]
    assert values == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("ids", "arguments", "message"),
    [
        (["punctuation:no_commas"], [{}], "unknown id"),
        (["keywords:existence"], [{}], "is missing an argument"),
        (["keywords:frequency"], [{"keyword": "a", "frequency": 1, "relation": "about"}], "at least"),
        (["startend:quotation"], [], "one length"),
        ("startend:quotation", [{}], "one length"),
        (["language:response_language"], [{"language": "xx"}], "languages that can be detected"),
    ],
)
def test_rows_that_cannot_be_checked(ids: Any, arguments: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        IFEval(IFEvalConfig()).check_row(row(instruction_id_list=ids, kwargs=arguments))


SENTENCES = {
    "ar": "ذهب الولد إلى المدرسة في الصباح مع أخته، وكان الجو جميلا.",
    "bg": "Момчето отиде на училище сутринта със сестра си и времето беше хубаво, но той не беше доволен от това.",
    "bn": "ছেলেটি সকালে তার বোনের সাথে স্কুলে গেল।",
    "de": "Der Junge ging am Morgen mit seiner Schwester in die Schule, und das Wetter war nicht schlecht.",
    "el": "Το αγόρι πήγε στο σχολείο το πρωί με την αδερφή του.",
    "en": "The boy went to school in the morning with his sister, and the weather was not bad.",
    "es": "El niño fue a la escuela por la mañana con su hermana y el tiempo no era malo.",
    "fa": "پسر صبح با خواهرش به مدرسه رفت و هوا در آن روز خیلی خوب بود.",
    "fi": "Poika meni aamulla kouluun siskonsa kanssa, ja sää oli hyvä, mutta hän ei ollut iloinen.",
    "fr": "Le garçon est allé à l'école le matin avec sa sœur, et le temps n'était pas mauvais.",
    "gu": "છોકરો સવારે તેની બહેન સાથે શાળાએ ગયો.",
    "he": "הילד הלך לבית הספר בבוקר עם אחותו.",
    "hi": "लड़का सुबह अपनी बहन के साथ स्कूल गया और मौसम अच्छा था, लेकिन वह खुश नहीं था।",
    "id": "Anak itu pergi ke sekolah pada pagi hari dengan adiknya, dan cuaca tidak buruk.",
    "it": "Il ragazzo è andato a scuola la mattina con la sorella e il tempo non era brutto.",
    "ja": "少年は朝、妹と一緒に学校へ行きました。天気は悪くなかったです。",
    "kn": "ಹುಡುಗ ಬೆಳಿಗ್ಗೆ ತನ್ನ ಸಹೋದರಿಯೊಂದಿಗೆ ಶಾಲೆಗೆ ಹೋದನು.",
    "ko": "소년은 아침에 여동생과 함께 학교에 갔습니다.",
    "ml": "കുട്ടി രാവിലെ സഹോദരിയോടൊപ്പം സ്കൂളിൽ പോയി.",
    "mr": "मुलगा सकाळी बहिणीबरोबर शाळेत गेला आणि हवामान चांगले होते, पण तो आनंदी नाही, असे ते म्हणतात.",
    "ne": "केटा बिहान आफ्नी बहिनीसँग विद्यालय गयो र मौसम राम्रो थियो, तर यो खुसी छ भन्न गाह्रो हुन्छ।",
    "nl": "De jongen ging in de ochtend met zijn zus naar school, en het weer was niet slecht.",
    "pa": "ਮੁੰਡਾ ਸਵੇਰੇ ਆਪਣੀ ਭੈਣ ਨਾਲ ਸਕੂਲ ਗਿਆ।",
    "pl": "Chłopiec poszedł rano do szkoły z siostrą, a pogoda nie była zła.",
    "pt": "O menino foi para a escola de manhã com a irmã e o tempo não estava mau.",
    "ru": "Мальчик пошёл утром в школу с сестрой, и погода была хорошая, но он не был рад.",
    "sv": "Pojken gick till skolan på morgonen med sin syster, och vädret var inte dåligt.",
    "sw": "Mvulana alienda shuleni asubuhi na dada yake, lakini hali ya hewa ilikuwa nzuri kwa watu wa mji huu.",
    "ta": "சிறுவன் காலையில் தன் சகோதரியுடன் பள்ளிக்குச் சென்றான்.",
    "te": "బాలుడు ఉదయం తన సోదరితో పాఠశాలకు వెళ్ళాడు.",
    "th": "เด็กชายไปโรงเรียนในตอนเช้ากับน้องสาวของเขา",
    "tr": "Çocuk sabah kız kardeşi ile okula gitti ve hava kötü değil, çok güzeldi.",
    "uk": "Хлопчик пішов уранці до школи з сестрою, і погода була гарна, але він не був радий.",
    "ur": "لڑکا صبح اپنی بہن کے ساتھ سکول گیا اور موسم اچھا تھا لیکن وہ خوش نہیں تھا۔",
    "vi": "Cậu bé đi học vào buổi sáng với chị gái và thời tiết không xấu.",
    "zh": "男孩早上和妹妹一起去学校，天气不错。",
}


def test_every_language_is_tested() -> None:
    assert set(SENTENCES) == LANGUAGES


@pytest.mark.parametrize("language", sorted(SENTENCES))
def test_a_sentence_of_each_language(language: str) -> None:
    assert language_of(SENTENCES[language]) == language


def test_an_answer_in_chinese_is_long_enough() -> None:
    fields = {"instructions": [{"kind": "response_language", "language": "zh"}]}
    texts = (SENTENCES["zh"], SENTENCES["ja"], "好")
    found = outcomes(IFEval(IFEvalConfig()), [completion(text, **fields) for text in texts])
    assert [outcome.value for outcome in found if isinstance(outcome, RewardResult)] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("text", ["", "123 + 4", "xkqj zvbn qwrt", "Paris", "日本語 text мир кот", "🙂🙂"])
def test_where_no_language_can_be_told(text: str) -> None:
    assert language_of(text) is None
