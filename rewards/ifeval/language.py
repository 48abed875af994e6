"""Which language a text is in: by its script, by letters that only some languages have, by frequent words.

Covers the languages of IFEval's `response_language` and a few more. It needs no data and gives the same
answer every time, which statistical detectors do not; for texts of a sentence or more.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

from roll_like.builtin.rewards.ifeval.text import fold

_SCRIPTS = {
    "ARABIC": ("ar", "fa", "ur"),
    "BENGALI": ("bn",),
    "CJK": ("zh",),
    "CYRILLIC": ("ru", "uk", "bg"),
    "DEVANAGARI": ("hi", "mr", "ne"),
    "GREEK": ("el",),
    "GUJARATI": ("gu",),
    "GURMUKHI": ("pa",),
    "HANGUL": ("ko",),
    "HEBREW": ("he",),
    "HIRAGANA": ("ja",),
    "KANNADA": ("kn",),
    "KATAKANA": ("ja",),
    "LATIN": ("en", "es", "pt", "fr", "de", "it", "nl", "pl", "sv", "vi", "sw", "fi", "tr", "id"),
    "MALAYALAM": ("ml",),
    "TAMIL": ("ta",),
    "TELUGU": ("te",),
    "THAI": ("th",),
}
_WORDS = {
    "en": "the of and to in is that it for was with as on be are this have from not you by at or his they we",
    "es": "el los las de que y en un una por con para no es se del al lo su más como pero fue está muy son",
    "pt": "o os as de que e em um uma por com para não é se do da no na ao mais como mas foi está muito são",
    "fr": "le la les de des et en un une du que qui dans pour pas est sur au aux avec ce il elle nous vous sont",
    "de": "der die das und in den von zu mit sich auf für ist im dem nicht ein eine als auch es an werden aus",
    "it": "il lo gli di che e in un una per con non è si del della dei alla più come ma sono anche nel questo",
    "nl": "de het een en van in is dat op te zijn voor met niet aan er maar om ook als bij uit door naar heeft",
    "pl": "i w z na do nie się to że jest o jak ale po co tak za od przez tym był które dla jego są oraz",
    "sv": "och i att det som en på är av för med till den har de inte om ett men var jag vi från kan när",
    "vi": "và của là có trong cho một không được các với những người này đã để khi ở từ đến về như cũng rất",
    "sw": "ya na wa kwa ni katika za la cha kuwa hii hiyo yake watu kama lakini au pia vya hilo ambayo huu sana",
    "fi": "ja on ei se että hän oli mutta joka kun niin myös ovat kuin ole tämä sen jos siitä mikä sitä nyt voi",
    "tr": "ve bir bu için da de ile çok olarak daha gibi ama en kadar olan sonra var ne değil her ise olduğu",
    "id": "yang dan di dari ini itu untuk dengan pada tidak adalah dalam ke akan juga oleh ada atau bisa mereka",
    "ru": "и в не на что с он как это по но из у за то все она так его от о же для мы был",
    "uk": "і в не на що з він як це та але до у за то все вона так його від про для ми був є",
    "bg": "и в не на че с той като това по но от у за то да се са е ще го си при към след",
    "ar": "في من على إلى أن هذا هذه التي الذي مع كان عن ما لا هو هي كل بعد بين قد",
    "fa": "در و به از که این را با است برای آن یک خود تا بر می هم نیز شد های",
    "ur": "میں کے کی ہے اور سے کا کو یہ پر کہ نے ہیں بھی اس ایک تھا ہو نہیں وہ",
    "hi": "है में के की और से का को यह पर कि ने हैं भी इस एक था हो नहीं वह",
    "mr": "आहे आणि या च्या ते हे आहेत होते नाही मध्ये एक त्या व की ही तो तर करून साठी",
    "ne": "छ र को मा यो हो लाई पनि छन् एक भएको गर्न थियो हुन्छ तथा बाट ले यस गरेको",
}
_FREQUENT = {language: frozenset(words.split()) for language, words in _WORDS.items()}
# letters that the other languages of the same script do not have
_LETTERS = {
    "ru": "ыэё",
    "uk": "іїєґ",
    "bg": "",
    "fa": "پچژگ",
    "ur": "ٹڈڑںے",
    "ar": "ةىإ",
    "vi": "ơưạảấầẩẫậắằẳẵặẹẻẽếềểễệịỉọỏốồổỗộớờởỡợụủứừửữựỳỵỷỹ",
    "pl": "ąęłńśźż",
    "tr": "ğış",
    "de": "ß",
    "pt": "ãõ",
    "es": "ñ¿¡",
}

#: Every language that can be told.
LANGUAGES = frozenset(language for languages in _SCRIPTS.values() for language in languages)


def language_of(text: str) -> str | None:
    """Return the ISO 639-1 code of the text's language; None where it cannot be told.

    >>> language_of("Das Haus ist nicht groß, und der Garten auch nicht.")
    'de'
    """
    letters = [char for char in unicodedata.normalize("NFC", text) if char.isalpha()]
    scripts = Counter(_script(char) for char in letters)
    if not scripts:
        return None
    # Japanese is written with Chinese characters too
    if scripts["HIRAGANA"] + scripts["KATAKANA"] > 0.1 * (scripts["CJK"] + 1) and scripts["CJK"]:
        scripts["HIRAGANA"] += scripts.pop("CJK")
    script, count = scripts.most_common(1)[0]
    if count < 0.6 * len(letters) or script not in _SCRIPTS:
        return None
    candidates = _SCRIPTS[script]
    return candidates[0] if len(candidates) == 1 else _most_likely(text, letters, candidates)


def _most_likely(text: str, letters: list[str], candidates: tuple[str, ...]) -> str | None:
    found = [fold(word) for word in re.findall(r"[\w\u0900-\u097f]+", text)]
    present = Counter(char.lower() for char in letters) + Counter(char for char in text if char in "¿¡")
    scores = {
        language: sum(word in _FREQUENT[language] for word in found) / max(len(found), 1)
        + 3 * sum(present[char] for char in _LETTERS.get(language, "")) / len(letters)
        for language in candidates
    }
    ranked = sorted(scores, key=lambda language: -scores[language])
    best, second = scores[ranked[0]], scores[ranked[1]]
    return ranked[0] if best > second and best >= 0.05 else None


def _script(char: str) -> str:
    name = unicodedata.name(char, "")
    return "CJK" if name.startswith("CJK") else name.partition(" ")[0]
