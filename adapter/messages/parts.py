"""Read blocks with text, images and documents as the parts of chat messages (contract, 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from ...schemas.anthropic.blocks import (
    Base64Source,
    Block,
    ContentSource,
    DocumentBlock,
    FileSource,
    ImageBlock,
    ResultPart,
    SearchResultBlock,
    TextBlock,
    TextSource,
    ToolReferenceBlock,
    UrlSource,
)
from ...schemas.openai.messages import ImagePart, ImageUrl, Part, TextPart
from ..errors import unsupported
from ..responses.files import Pdf

Content: TypeAlias = str | list[Part]
# A part, and its path in the request.
Placed: TypeAlias = tuple[Part, str]

# The text in place of an image in a result or in an earlier message, for a model that takes no
# images. The client could not send its conversation again without the image.
UNSEEN = "[An image, which this model cannot see.]"
_PDF = "application/pdf"


class PartReader:
    """A reader of the blocks of one request.

    Args:
        pdf_texts: the text of each PDF file, by its data as the client sent it.
        sees: False if the model takes no images.

    Attributes:
        unread: the PDF files whose texts are missing.
        pdf_size: the number of characters of the other ones.
        ignored: the paths of members that have no effect.
        inexact: the paths of blocks that are only approximated.
    """

    def __init__(self, pdf_texts: Mapping[str, str], sees: bool) -> None:
        self._pdf_texts = pdf_texts
        self._sees = sees
        self.unread: list[Pdf] = []
        self.pdf_size = 0
        self.ignored: list[str] = []
        self.inexact: list[str] = []

    def read(self, block: Block | ResultPart, path: str, is_new: bool = False) -> list[Placed]:
        """Return the parts of a block.

        Args:
            is_new: True for a block of a new message of the user, whose images stay. They are an
                error if the model takes none.

        Raises:
            InvalidRequest: the block names a file that this server does not have or fetch.
        """
        if isinstance(block, TextBlock):
            return [(_text(block.text), path)]
        if isinstance(block, ImageBlock):
            return [(self._image(block, path, is_new), path)]
        if isinstance(block, DocumentBlock):
            return self._document(block, path, is_new)
        if isinstance(block, SearchResultBlock):
            text = "".join(part.text for part in block.content)
            return [(_text(f"{block.title}\n{block.source}\n{text}\n"), path)]
        assert isinstance(block, ToolReferenceBlock)
        return [(_text(f"Tool: {block.tool_name}"), path)]

    def _image(self, block: ImageBlock, path: str, is_new: bool) -> Part:
        source = block.source
        if not self._sees and not is_new:
            self.inexact.append(path)
            return _text(UNSEEN)
        if isinstance(source, FileSource):
            raise unsupported(f"{path}.source", "Send the image in base64.")
        # The bytes decide about the type, as they do for OpenAI's endpoints.
        url = (
            source.url if isinstance(source, UrlSource) else f"data:image/png;base64,{source.data}"
        )
        return ImagePart(type="image_url", image_url=ImageUrl(url=url))

    def _document(self, block: DocumentBlock, path: str, is_new: bool) -> list[Placed]:
        source, citations = block.source, block.citations
        if isinstance(citations, dict) and citations.get("enabled"):
            self.ignored.append(f"{path}.citations")
        title = f"Document '{block.title}':\n" if block.title else "Document:\n"
        if block.context:
            title += f"{block.context}\n"
        if isinstance(source, UrlSource | FileSource):
            raise unsupported(f"{path}.source", "Send the document in base64, or its text.")
        if isinstance(source, ContentSource) and not isinstance(source.content, str):
            found: list[Placed] = [(_text(title), path)]
            for index, part in enumerate(source.content):
                here = f"{path}.source.content[{index}]"
                found += self.read(part, here, is_new)
            return [*found, (_text("\n"), path)]
        if isinstance(source, TextSource):
            text = source.data
        elif isinstance(source, Base64Source):
            text = self._pdf(source, f"{path}.source")
            self.inexact.append(path)
        else:
            assert isinstance(source.content, str)
            text = source.content
        return [(_text(f"{title}{text.removesuffix(chr(10))}\n"), path)]

    def _pdf(self, source: Base64Source, path: str) -> str:
        if source.media_type not in (None, _PDF):
            raise unsupported(f"{path}.media_type", "Only application/pdf is read from base64.")
        text = self._pdf_texts.get(source.data)
        if text is None:
            self.unread.append(Pdf(f"{path}.data", source.data))
            return ""
        self.pdf_size += len(text)
        return text


def _text(text: str) -> TextPart:
    return TextPart(type="text", text=text)
