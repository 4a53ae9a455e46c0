"""Instructor, in each of its modes for such a server."""

import instructor
from checks import MODEL, QUESTION, SYSTEM, URL, run_checks
from openai import OpenAI
from pydantic import BaseModel, Field

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
LIMITS = {"model": MODEL, "max_tokens": 80, "temperature": 0, "max_retries": 0}


class City(BaseModel):
    name: str = Field(max_length=12)
    large: bool


def check_mode(mode: instructor.Mode) -> None:
    asks = instructor.from_openai(client, mode=mode)
    city = asks.chat.completions.create(messages=MESSAGES, response_model=City, **LIMITS)
    assert isinstance(city, City)


def tools() -> None:
    check_mode(instructor.Mode.TOOLS)


def json_schema() -> None:
    check_mode(instructor.Mode.JSON_SCHEMA)


def partial() -> None:
    asks = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    params = {**LIMITS, "messages": MESSAGES}
    *_, city = asks.chat.completions.create_partial(response_model=City, **params)
    assert city.name


def many() -> None:
    asks = instructor.from_openai(client, mode=instructor.Mode.TOOLS)

    class Cities(BaseModel):
        cities: list[City] = Field(min_length=1, max_length=2)

    cities = asks.chat.completions.create(messages=MESSAGES, response_model=Cities, **LIMITS)
    assert cities.cities


run_checks(tools, json_schema, partial, many)
