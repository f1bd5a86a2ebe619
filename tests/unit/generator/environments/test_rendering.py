"""What a model reads between its turns is, token for token, what its chat template writes there."""

import pytest

from penstock.v1 import types_pb2
from services.generator.environments.rendering import ChatRenderer, TextRenderer, UnrenderableError
from services.generator.openai.formats.chat_template import ConversationTokenizer
from services.trainer.data.tokenizer import HuggingFaceTokenizer
from tests.helpers.models.tiny_model import EOS, make_tokenizer

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def message(role, content):
    return types_pb2.ChatMessage(role=role, content=content)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    made = ConversationTokenizer(folder)
    made.folder = folder
    yield made
    made.close()


def text(model, token_ids):
    return model.raw_text_of(token_ids).replace(" ", "")


@pytest.mark.parametrize("opens", [False, True])
async def test_a_chat_is_the_templates_own(model, opens):
    prompt = [message("user", "go")]
    renderer = ChatRenderer(model, prompt, TOOLS, opens=opens)
    opening = [message("user", "hi")] if opens else []
    given = await renderer.opening(opening)
    spoken = [{"role": "user", "content": "go"}, *({"role": said.role, "content": said.content} for said in opening)]
    [end] = await model.encode_tail(EOS)
    for answer, answers in (("one", [message("tool", "1"), message("user", "more")]), ("two", [message("tool", "2")])):
        sampled = [*await model.encode_tail(answer), end]
        given += sampled + await renderer.answer(answer, end, answers)
        spoken += [{"role": "assistant", "content": answer}]
        spoken += [{"role": said.role, "content": said.content} for said in answers]
    whole = await model.encode_chat(spoken, TOOLS)
    row = await model.encode_chat(spoken[:1], TOOLS)
    known = row if not opens else row[: len(row) - len(await model.encode_tail("[assistant]"))]
    assert [*known, *given] == whole
    # The trainer's prompt is what all of this follows.
    tokenizer = HuggingFaceTokenizer(model.folder)
    tokenizer.note_environment(tools=TOOLS, opens=opens)
    assert tokenizer.encode_chat([("user", "go")]) == known


async def test_what_a_template_refuses_is_named(model):
    renderer = ChatRenderer(model, [message("user", "go")], None, opens=False)
    await renderer.opening([])
    with pytest.raises(UnrenderableError, match="system, tool"):
        await renderer.answer("one", 2, [message("system", "x"), message("tool", "1")])
    with pytest.raises(UnrenderableError, match="opens"):
        await ChatRenderer(model, [message("user", "go")], None, opens=False).opening([message("user", "hi")])


async def test_text_goes_on_as_text(model):
    renderer = TextRenderer(model)
    given = await renderer.answer("one", 2, [message("user", "no"), message("tool", "=3")])
    assert text(model, given) == "no=3"
