"""The prompts of rerankers, as llama.cpp's server writes them (`format_prompt_rerank`)."""

from __future__ import annotations

import re
from collections.abc import Callable

import llama_cpp

from ..base import TokenIds
from .vocabulary import Vocabulary

_PLACE = re.compile(r"\{(query|document)\}")


class RankPrompts:
    """The prompts for one query.

    Args:
        template: the model's template, with the places `{query}` and `{document}`; without one, a
            prompt is the query and the document between BOS, SEP and EOS.
    """

    def __init__(self, vocabulary: Vocabulary, template: str | None, query: str) -> None:
        self._vocabulary = vocabulary
        self._query = query
        self._template = template
        self._query_ids = self._plain(query)
        self.ids: Callable[[str], tuple[TokenIds, int]] = (
            self._between if template is None else self._filled
        )

    def _plain(self, text: str) -> TokenIds:
        return self._vocabulary.tokenize(text, add_special=False, parse_special=False)

    def _between(self, document: str) -> tuple[TokenIds, int]:
        """Return the tokens of a prompt, and the number of those of query and document."""
        pointer, own = self._vocabulary.pointer, self._plain(document)
        eos, sep = llama_cpp.llama_vocab_eos(pointer), llama_cpp.llama_vocab_sep(pointer)
        end = [eos if eos >= 0 else sep] if llama_cpp.llama_vocab_get_add_eos(pointer) else []
        begin = [self._vocabulary.bos_id] if self._vocabulary.adds_bos else []
        middle = [*end, sep] if llama_cpp.llama_vocab_get_add_sep(pointer) else end
        ids = (*begin, *self._query_ids, *middle, *own, *end)
        return ids, len(self._query_ids) + len(own)

    def _filled(self, document: str) -> tuple[TokenIds, int]:
        """Return the tokens of a filled template, and their number.

        Control tokens in query and document are text, so texts that spell some are tokenized apart
        from the template.
        """
        texts = {"query": self._query, "document": document}
        vocabulary = self._vocabulary
        if not any(map(self._spells, texts.values())):
            text = _PLACE.sub(lambda place: texts[place[1]], self._template or "")
            ids = vocabulary.tokenize(text, add_special=False, parse_special=True)
            return ids, len(ids)
        found: list[int] = []
        for number, part in enumerate(_PLACE.split(self._template or "")):
            if number % 2:
                found += self._plain(texts[part])
            else:
                found += vocabulary.tokenize(part, add_special=False, parse_special=True)
        return tuple(found), len(found)

    def _spells(self, text: str) -> bool:
        """Return True if a text spells a control token."""
        parsed = self._vocabulary.tokenize(text, add_special=False, parse_special=True)
        return parsed != self._plain(text)
