"""Parse a page: its tags, and the data that its script draws."""

import json
from html.parser import HTMLParser


class Page(HTMLParser):
    """The tags and attributes of a page, and the contents of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.scripts = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script":
            self.scripts.append(data)


def page_data(text):
    """Return the data that the script of a page draws."""
    return json.loads(Page(text).scripts[0])
