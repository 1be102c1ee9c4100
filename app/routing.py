"""The routing map of one text: averaged over its tokens, and of each token."""

import streamlit as st
from common import choose_checkpoint, code, show_error, show_fidelity, show_notes, trace_of

import resinspect as ri

SENTENCE = "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do."
SIDE_BY_SIDE = 24  # sources of a map that fits half a page
STRIP = 80  # tokens in the strip at a time

WORDS = """
A transformer forms the input of every sublayer from what earlier ones wrote. The map shows with which coefficients.

- **Source** (column): something written into the residual: the embedding, then the output (*write*) of each attention
  and MLP sublayer, such as `3.attn`.
- **Reader** (row): a place that reads the residual: the input of each sublayer, and `final`, what the head sees.
- **Routing weight** (colour): the coefficient of the source's write in the reader's input. In a plain residual every
  weight is 1; weights need not sum to 1 and may be negative.
- **Fidelity**: the relative error of rebuilding, from the map, what each reader really read. Where weights differ by
  channel it is that of the full contributions, and a line says how much the colours, their best scalars, leave out.

**Routing weight is not importance.** A large weight on a small write changes little, and what a reader does with its
input is not in the map. That takes an intervention to find out.
"""


def page() -> None:
    """The whole page: what to look at on the left and right, the maps below."""
    title, words = st.columns([3, 1], vertical_alignment="bottom")
    title.header("Routing map", anchor=False)
    with words.popover("How to read it", icon=":material/help:", width="stretch"):
        st.markdown(WORDS)
    left, right = st.columns([1, 2], gap="medium")
    with left:
        checkpoint = choose_checkpoint()
        st.button("Run", type="primary", icon=":material/play_arrow:")
    with right:
        text = st.text_area("Text", SENTENCE, height=116, help="Ctrl+Enter runs it, as does Run.", key="text")
    if checkpoint is None:
        st.info("Type the path of a checkpoint.", icon=":material/folder:")
    elif not text.strip():
        st.info("Type a sentence to see its routing map.", icon=":material/edit:")
    else:
        show(checkpoint, text)


def show(checkpoint: str, text: str) -> None:
    """The maps, or the one sentence that says why there are none."""
    try:
        trace, notes = trace_of(checkpoint, text)
    except ri.ResinspectError as error:
        show_error(error)
        return
    show_notes(notes)
    maps(trace, f"{checkpoint}\n{text}")


@st.fragment
def maps(trace: object, what: str) -> None:
    """Both maps and the way through the tokens; moving on reruns only this part."""
    token, limits = choose(trace, what)
    average, single = places(trace)
    with average:
        count = trace.sizes["token"]
        st.markdown(f"**Mean over {count} token{'s' if count > 1 else ''}**")
        show_fidelity(trace)
        draw(ri.routing_map(trace, limits=limits), "map_mean")
    with single:
        part = ri.select(trace, tokens=token)
        st.markdown(f"**Token {token}** {code(str(part['text'].values[0]))} · {loss(part)}")
        show_fidelity(part)
        draw(ri.routing_map(trace, token=token, limits=limits), "map_token")


def places(trace: object) -> tuple[object, object]:
    """Where the average and the token go: side by side, or a large map below the other, the one that changes first."""
    if trace.sizes["source"] <= SIDE_BY_SIDE:
        return tuple(st.columns(2, gap="medium"))
    single, average = st.container(), st.container()
    return average, single


def choose(trace: object, what: str) -> tuple[int, tuple[float, float]]:
    """A token, by slider, by buttons or in the text itself, which move together; and the colour scale of both maps."""
    state, last = st.session_state, trace.sizes["token"] - 1
    # Streamlit forgets the token while a message stands in place of its slider.
    if state.get("what") != what or "token" not in state:
        state.what, state.token = what, 0
    back, on, slider, colours = st.columns([2, 2, 8, 2.4], vertical_alignment="bottom")
    with colours:
        limits = choose_limits(trace)
    if last > 0:
        back.button("Previous", key="previous", on_click=move, args=(-1, last), shortcut="p", width="stretch")
        on.button("Next", key="next", on_click=move, args=(1, last), shortcut="n", width="stretch")
        slider.slider("Token", 0, last, key="token")
    strip(trace, last)
    return state.token, limits


def move(step: int, last: int) -> None:
    st.session_state.token = min(max(st.session_state.token + step, 0), last)


def strip(trace: object, last: int) -> None:
    """The tokens around the chosen one, to click on."""
    first = st.session_state.token // STRIP * STRIP
    end = min(first + STRIP, last + 1)
    texts = trace["text"].values
    st.session_state.strip = st.session_state.token
    st.pills(
        f"Tokens {first} to {end - 1} of {last + 1}",
        range(first, end),
        # The number tells apart tokens of the same text.
        format_func=lambda index: f":gray[{index}] {code(str(texts[index]))}",
        key="strip",
        on_change=pick,
        label_visibility="visible" if last >= STRIP else "collapsed",
    )


def pick() -> None:
    if st.session_state.strip is not None:
        st.session_state.token = st.session_state.strip


def choose_limits(trace: object) -> tuple[float, float]:
    """One colour scale for both maps: that of all tokens, or a shorter one."""
    low, high = ri.routing_map(trace, token=0).limits
    with st.popover("Colours", icon=":material/palette:", width="stretch"):
        share = st.slider(
            "Colours end at this share of the largest weight",
            1,
            100,
            100,
            format="%d %%",
            help="Lower it where a few weights are much larger than the others.",
        )
    return low * share / 100, high * share / 100


def loss(part: object) -> str:
    """Loss of predicting the token after this one."""
    value = float(part["loss"].values[0]) if "loss" in part else float("nan")
    return "no next token to predict" if value != value else f"loss of the next token **{value:.2f} nats**"


def draw(description: object, key: str) -> None:
    st.plotly_chart(
        # Half a page or a whole one of a small window: the caption must fit.
        ri.to_plotly(description, width=500 if len(description.x) <= SIDE_BY_SIDE else 900),
        key=key,
        alt=f"{description.title}. {description.caption}",
        config={"displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"]},
    )


page()
