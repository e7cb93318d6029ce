"use strict";

const byId = (id) => document.getElementById(id);
const DEFAULT_QUESTION = byId("question").placeholder; // asked if the first question about an image is left empty
const chat = { model: null, image: null, turns: [], generation: null, apiKey: "" }; // image: data URL; turns: [question, answer]

function requestHeaders() {
  return { "Content-Type": "application/json", ...(chat.apiKey && { Authorization: `Bearer ${chat.apiKey}` }) };
}

async function loadModel() {
  const response = await fetch("/v1/models", { headers: requestHeaders() });
  byId("key-form").hidden = response.status !== 401;
  if (response.status === 401) {
    byId("api-key").focus();
    if (!chat.apiKey) return showError("");
    throw new Error("This is not the server's API key.");
  }
  if (!response.ok) throw await responseError(response);
  const [model] = (await response.json()).data;
  chat.model = model.id;
  byId("model").textContent = model.id === "nanovlm" ? "the embedded model" : model.id;
  byId("note").textContent = toSentence(model.description);
  showError("");
}

async function responseError(response) {
  const body = await response.json().catch(() => null);
  return new Error(body?.error?.message ?? `The server answered with status ${response.status}.`);
}

function showError(message) {
  byId("error").textContent = toSentence(message);
}

function toSentence(text) {
  return text && text[0].toUpperCase() + text.slice(1) + (/[.?!]$/.test(text) ? "" : ".");
}

function openImage(file) {
  if (!file) return;
  chat.generation?.abort();
  const reader = new FileReader();
  reader.onerror = () => showError(`${file.name || "The image"} cannot be read.`);
  reader.onload = () => {
    URL.revokeObjectURL(byId("image").src);
    resetConversation(reader.result);
    byId("image").src = URL.createObjectURL(file);
    byId("image").alt = file.name ? `Your image, ${file.name}` : "Your image";
    byId("no-preview").textContent = `Browsers cannot show ${file.name || "this image"}, but you can ask about it.`;
    byId("announcement").textContent = "The image is loaded; ask about it.";
    byId("question").focus();
  };
  reader.readAsDataURL(file);
}

function closeImage() {
  chat.generation?.abort();
  resetConversation(null);
  byId("file").value = "";
  byId("file").focus();
}

function resetConversation(image) {
  Object.assign(chat, { image, turns: [] });
  byId("conversation").replaceChildren();
  byId("question").placeholder = DEFAULT_QUESTION;
  for (const id of ["image", "new-image"]) byId(id).hidden = !image;
  for (const id of ["file", "drop-zone", "sample"]) byId(id).hidden = Boolean(image);
  byId("no-preview").hidden = true;
  showError("");
}

function buildMessages(question) {
  const messages = chat.turns.flatMap(([question, answer]) => [
    { role: "user", content: question },
    { role: "assistant", content: answer },
  ]);
  messages.push({ role: "user", content: question });
  if (chat.image)
    messages[0].content = [
      { type: "image_url", image_url: { url: chat.image } },
      { type: "text", text: messages[0].content },
    ];
  return messages;
}

async function* streamText(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (buffer + value).split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const { error, choices } = JSON.parse(data);
      if (error) throw new Error(error.message);
      yield choices[0]?.delta.content ?? "";
    }
  }
}

function addTurn(question) {
  const turn = document.createElement("li");
  const [questionText, answer] = ["question", "answer"].map((className) => {
    const paragraph = document.createElement("p");
    paragraph.className = className;
    return turn.appendChild(paragraph);
  });
  questionText.textContent = question;
  byId("conversation").append(turn);
  turn.scrollIntoView({ block: "nearest" });
  return { turn, answer };
}

async function generate(question, signal, onText) {
  if (!chat.model) await loadModel();
  const body = JSON.stringify({ model: chat.model, messages: buildMessages(question), stream: true });
  const response = await fetch("/v1/chat/completions", { method: "POST", headers: requestHeaders(), body, signal });
  if (!response.ok) throw await responseError(response);
  for await (const text of streamText(response)) onText(text);
}

async function ask(question) {
  const { turn, answer } = addTurn(question);
  const generation = (chat.generation = new AbortController());
  answer.classList.add("generating");
  showError("");
  setBusy(true);
  try {
    await generate(question, generation.signal, (text) => {
      answer.textContent += text;
      turn.scrollIntoView({ block: "nearest" });
    });
  } catch (error) {
    if (!generation.signal.aborted)
      showError(error instanceof TypeError ? "The server cannot be reached." : error.message);
  }
  answer.classList.remove("generating");
  chat.generation = null;
  setBusy(false);
  if (!turn.isConnected) return; // another image was opened meanwhile
  if (answer.textContent) {
    chat.turns.push([question, answer.textContent]);
    byId("question").placeholder = "Ask something else.";
    byId("announcement").textContent = answer.textContent; // at once: screen readers interrupt text that changes
  } else {
    if (!generation.signal.aborted && !byId("error").textContent) showError("The answer is empty; ask differently.");
    turn.remove();
    byId("question").value ||= question;
    fitQuestion();
  }
}

function setBusy(busy) {
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
}

function fitQuestion() {
  const field = byId("question");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

byId("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (chat.generation) return;
  const question = byId("question").value.trim() || (chat.image && !chat.turns.length ? DEFAULT_QUESTION : "");
  if (!question) return showError(chat.image ? "Ask something." : "Choose an image, or ask something.");
  byId("question").value = "";
  fitQuestion();
  ask(question);
});
byId("question").addEventListener("input", fitQuestion);
byId("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask-form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => event.key === "Escape" && chat.generation?.abort());
byId("stop").addEventListener("click", () => {
  chat.generation?.abort();
  byId("question").focus();
});
byId("new-image").addEventListener("click", closeImage);
byId("file").addEventListener("change", () => openImage(byId("file").files[0]));
byId("image").addEventListener("error", () => {
  byId("image").hidden = true;
  byId("no-preview").hidden = false;
});
byId("sample").firstElementChild.addEventListener("click", async () => {
  const response = await fetch("/sample.png");
  openImage(new File([await response.blob()], "sample.png", { type: "image/png" }));
});
document.addEventListener("paste", (event) => {
  const image = [...event.clipboardData.files].find((file) => file.type.startsWith("image/"));
  if (image) {
    event.preventDefault();
    openImage(image);
  }
});
for (const type of ["dragover", "dragleave", "drop"])
  document.addEventListener(type, (event) => {
    event.preventDefault();
    document.body.classList.toggle("dragging", type === "dragover");
    if (type === "drop") openImage(event.dataTransfer.files[0]);
  });
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  chat.apiKey = byId("api-key").value;
  loadModel().then(() => byId("question").focus(), (error) => showError(error.message));
});
loadModel().catch((error) => showError(error.message));
