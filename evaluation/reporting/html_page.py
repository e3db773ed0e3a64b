"""One self-contained HTML page from sections of tables and pictures.

A page that is mailed, or opened from a folder years later, must still show the same. It fetches
nothing, and its content security policy forbids it to; the pictures are SVG inside it, and the only
script that may run is the one that sorts tables (`assets/page.js`, known to the policy by its hash).
All texts come from other people's files and are escaped.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from evaluation.reporting.charts import Picture, svg_text
from evaluation.reporting.tables import Section

ASSETS = Path(__file__).with_name("assets")


def page_text(
    title: str, introduction: str, sections: Sequence[Section], alarms: Sequence[str] = ()
) -> str:
    """Return the page: alarms above everything else, an introduction, sections; all texts are plain.

    The names of all pictures in the sections differ.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS), autoescape=True, undefined=jinja2.StrictUndefined
    )
    script = (ASSETS / "page.js").read_text(encoding="utf-8")
    # The template puts line ends around the script.
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; "
        f"img-src data:; script-src 'sha256-{digest}'"  # a picture's colour bar is an image in it
    )

    def svg(picture: Picture) -> Markup:
        return Markup(svg_text(picture.figure, picture.name))  # matplotlib escapes its texts

    return environment.get_template("page.html").render(
        title=title,
        introduction=introduction,
        sections=sections,
        alarms=alarms,
        policy=policy,
        style=Markup((ASSETS / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        svg=svg,
    )
