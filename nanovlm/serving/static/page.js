"use strict";

const at = (id) => document.getElementById(id);
const FIRST = at("question").placeholder; // is asked of a picture when nothing else is
const chat = { model: null, picture: null, turns: [], talking: null, key: "" }; // turns: questions and answers so far

const headers = () => ({ "Content-Type": "application/json", ...(chat.key && { Authorization: `Bearer ${chat.key}` }) });

async function meet() {
  const response = await fetch("/v1/models", { headers: headers() });
  at("key").hidden = response.status !== 401;
  if (response.status === 401) {
    at("secret").focus();
    if (!chat.key) return complain("");
    throw new Error("That is not this server's key.");
  }
  if (!response.ok) throw await reason(response);
  const [model] = (await response.json()).data;
  chat.model = model.id;
  at("model").textContent = model.id === "nanovlm" ? "the embedded model" : model.id;
  at("note").textContent = sentence(model.description);
  complain("");
}

async function reason(response) {
  const said = await response.json().catch(() => null);
  return new Error(said?.error?.message ?? `The server says ${response.status}.`);
}

const complain = (message) => (at("error").textContent = sentence(message));

function sentence(words) {
  return words && words[0].toUpperCase() + words.slice(1) + (/[.?!]$/.test(words) ? "" : ".");
}

function show(file) {
  if (!file) return;
  chat.talking?.abort();
  const reader = new FileReader();
  reader.onerror = () => complain(`${file.name || "The picture"} cannot be read.`);
  reader.onload = () => {
    URL.revokeObjectURL(at("picture").src);
    Object.assign(chat, { picture: reader.result, turns: [] });
    at("talk").replaceChildren();
    at("question").placeholder = FIRST;
    at("picture").src = URL.createObjectURL(file);
    at("picture").alt = file.name ? `Your picture, ${file.name}` : "Your picture";
    at("unseen").textContent = `${file.name || "This picture"} is of a kind that browsers do not show. Ask about it all the same.`;
    arrange(true);
    complain("");
    at("spoken").textContent = "The picture is here; ask about it.";
    at("question").focus();
  };
  reader.readAsDataURL(file);
}

function arrange(shown) {
  for (const id of ["picture", "again"]) at(id).hidden = !shown;
  for (const id of ["file", "drop", "sample"]) at(id).hidden = shown;
  at("unseen").hidden = true;
}

function startOver() {
  chat.talking?.abort();
  Object.assign(chat, { picture: null, turns: [] });
  at("talk").replaceChildren();
  at("file").value = "";
  arrange(false);
  at("question").placeholder = FIRST;
  complain("");
  at("file").focus();
}

function messages(question) {
  const said = chat.turns.flatMap(([asked, answer]) => [
    { role: "user", content: asked },
    { role: "assistant", content: answer },
  ]);
  said.push({ role: "user", content: question });
  if (chat.picture)
    said[0].content = [
      { type: "image_url", image_url: { url: chat.picture } },
      { type: "text", text: said[0].content },
    ];
  return said;
}

async function* words(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const { error, choices } = JSON.parse(data);
      if (error) throw new Error(error.message);
      yield choices[0]?.delta.content ?? "";
    }
  }
}

async function ask(question) {
  const turn = document.createElement("li");
  const [asked, answer] = ["question", "answer"].map((kind) => {
    const p = document.createElement("p");
    p.className = kind;
    return turn.appendChild(p);
  });
  asked.textContent = question;
  answer.classList.add("saying");
  at("talk").append(turn);
  turn.scrollIntoView({ block: "nearest" });
  complain("");
  const talking = (chat.talking = new AbortController());
  busy(true);
  try {
    if (!chat.model) await meet();
    const body = JSON.stringify({ model: chat.model, messages: messages(question), stream: true });
    const options = { method: "POST", headers: headers(), body, signal: talking.signal };
    const response = await fetch("/v1/chat/completions", options);
    if (!response.ok) throw await reason(response);
    for await (const piece of words(response)) {
      answer.textContent += piece;
      turn.scrollIntoView({ block: "nearest" });
    }
  } catch (error) {
    if (!talking.signal.aborted) complain(error instanceof TypeError ? "The server cannot be reached." : error.message);
  }
  answer.classList.remove("saying");
  chat.talking = null;
  busy(false);
  if (!turn.isConnected) return; // another picture has come meanwhile
  if (answer.textContent) {
    chat.turns.push([question, answer.textContent]);
    at("question").placeholder = "Ask something else.";
    at("spoken").textContent = answer.textContent; // once, whole: a word at a time would not be heard out
  } else {
    if (!talking.signal.aborted && !at("error").textContent) complain("The model said nothing; ask otherwise.");
    turn.remove();
    at("question").value ||= question;
    grow();
  }
}

function busy(yes) {
  at("send").hidden = yes;
  at("stop").hidden = !yes;
}

function grow() {
  const field = at("question");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (chat.talking) return;
  const question = at("question").value.trim() || (chat.picture && !chat.turns.length ? FIRST : "");
  if (!question) return complain(chat.picture ? "Ask something." : "Choose a picture, or ask something.");
  at("question").value = "";
  grow();
  ask(question);
});
at("question").addEventListener("input", grow);
at("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => event.key === "Escape" && chat.talking?.abort());
at("stop").addEventListener("click", () => {
  chat.talking?.abort();
  at("question").focus();
});
at("again").addEventListener("click", startOver);
at("file").addEventListener("change", () => show(at("file").files[0]));
at("picture").addEventListener("error", () => {
  at("picture").hidden = true;
  at("unseen").hidden = false;
});
at("sample").firstElementChild.addEventListener("click", async () => {
  const response = await fetch("/sample.png");
  show(new File([await response.blob()], "sample.png", { type: "image/png" }));
});
document.addEventListener("paste", (event) => {
  const file = [...event.clipboardData.files].find((one) => one.type.startsWith("image/"));
  if (file) {
    event.preventDefault();
    show(file);
  }
});
for (const kind of ["dragover", "dragleave", "drop"])
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    document.body.classList.toggle("dragged", kind === "dragover");
    if (kind === "drop") show(event.dataTransfer.files[0]);
  });
at("key").addEventListener("submit", (event) => {
  event.preventDefault();
  chat.key = at("secret").value;
  meet().then(() => at("question").focus(), (error) => complain(error.message));
});
meet().catch((error) => complain(error.message));
