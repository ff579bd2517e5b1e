"Packaging: every field comes from settings.ini."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
parser = ConfigParser(delimiters=["="], interpolation=None)
parser.read(here / "settings.ini", encoding="utf-8")
settings = parser["DEFAULT"]


def lines(key): return [line.strip() for line in settings.get(key, "").splitlines() if line.strip()]


setup(
    name=settings["name"], version=settings["version"], description=settings["description"],
    author=settings["author"], license=settings["license"], keywords=settings["keywords"].split(),
    long_description=(here / "README.md").read_text(encoding="utf-8"), long_description_content_type="text/markdown",
    python_requires=settings["python_requires"], packages=find_packages(include=["llmserve", "llmserve.*"]),
    install_requires=lines("requirements"), extras_require={"dev": lines("dev_requirements")},
    entry_points={"console_scripts": lines("console_scripts")},
)
