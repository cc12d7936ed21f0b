"""Reading of HTML pages, which are well-formed XML."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree


def parse(page: str) -> ElementTree.Element:
    """Parse a page as XML, which fails if anything is unescaped or unclosed."""
    return ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))


def text_of(element: ElementTree.Element) -> str:
    return " ".join("".join(element.itertext()).split())


def sections(page: str) -> dict[str, ElementTree.Element]:
    """Return the sections by their headings, in order."""
    return {text_of(next(section.iter("h2"))): section for section in parse(page).iter("section")}


def rows(section: ElementTree.Element, number: int = 0) -> list[list[str]]:
    """Return the rows of a table of a section, without its head."""
    table = list(section.iter("table"))[number]
    return [[text_of(cell) for cell in row] for row in table.iter("tr")][1:]


def captions(section: ElementTree.Element) -> list[str]:
    return [text_of(next(figure.iter("figcaption"))) for figure in section.iter("figure")]


def loads_nothing(page: str) -> bool:
    """Return whether a page has no script, and no address from which a browser would load something."""
    tags = {element.tag.rpartition("}")[2] for element in parse(page).iter()}
    style = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    attributes = [pair for element in parse(page).iter() for pair in element.attrib.items()]
    addresses = [
        value for name, value in attributes if name.rpartition("}")[2] in {"src", "href", "srcset", "data", "action"}
    ]
    no_address = all(address.startswith("#") for address in addresses) and not any(
        re.search(r"url\((?!#)", value) for _, value in attributes
    )
    return (
        no_address
        and not {"script", "link", "img", "iframe"} & tags
        and not re.search(r"@import|url\(", "".join(style))
    )
