"""`page`: a story as one self-contained HTML page: no network, no script."""

import jinja2

from canary_desk.explain.story import Story


def page(story: Story) -> str:
    """The page's text. All of a bundle's content is escaped."""
    return template("explain", "page.html.jinja").render(story=story, first=story.diagnoses[0])


def template(room: str, name: str) -> jinja2.Template:
    """A template of a ``room`` of the desk. All that is rendered is escaped."""
    loader = jinja2.PackageLoader(f"canary_desk.{room}", "templates")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(name)
