// The openai SDK for npm: its objects hold what plain HTTP says, its exceptions the errors. Reports as checking.py says.

import { deepStrictEqual, ok, rejects } from "node:assert";
import { createRequire } from "node:module";

// the environment's folder is the working directory; this script lies elsewhere
const OpenAI = createRequire(`${process.cwd()}/`)("openai").OpenAI;
const [url, model, apiKey] = process.argv.slice(2);
const ANSWER_MS = 300_000;
const IDLE_MS = 60_000;
const MOST_CHOICES = 128;
const CHAT = {
  messages: [
    { role: "system", content: "You are Minnow, a small helpful model." },
    { role: "user", content: "What is expert parallelism?" },
  ],
  temperature: 0,
  max_tokens: 40,
};
const COMPLETION = {
  prompt: "In the beginning God created the heaven and the earth.",
  temperature: 0,
  max_tokens: 40,
};
const DRAWN = {
  messages: [{ role: "user", content: "Tell me a story about a dragon." }],
  temperature: 1,
  seed: 7,
  n: 3,
  max_tokens: 24,
};
const CHAT_PATH = "/v1/chat/completions";
const TOOL = {
  name: "get_weather",
  description: "Weather of a city",
  parameters: {
    type: "object",
    properties: { city: { type: "string" } },
    required: ["city"],
    additionalProperties: false,
  },
  strict: true,
};
const TOOL_CHAT = {
  messages: [{ role: "user", content: "What is the weather in Paris?" }],
  tools: [{ type: "function", function: TOOL }],
  tool_choice: "auto",
  temperature: 0,
  max_tokens: 60,
};
const CAPITAL = {
  messages: [{ role: "user", content: "What is the capital of Norway?" }],
  response_format: {
    type: "json_schema",
    json_schema: {
      name: "capital",
      strict: true,
      schema: {
        type: "object",
        properties: { capital: { enum: ["Oslo", "Paris", "Rome"] }, coastal: { type: "boolean" } },
        required: ["capital", "coastal"],
        additionalProperties: false,
      },
    },
  },
  temperature: 0,
  max_tokens: 300,
};
const REASONING = {
  messages: [
    { role: "user", content: "Repeat after me: The brave owl sat on the drum." },
    { role: "assistant", content: "<think>The brave" },
  ],
  continue_final_message: true,
  add_generation_prompt: false,
  temperature: 0,
  max_tokens: 20,
};
const RESPONSE = {
  instructions: CHAT.messages[0].content,
  input: CHAT.messages[1].content,
  temperature: 0,
  max_output_tokens: 40,
};
const EXTRAS = { return_token_ids: true, prompt_logprobs: 1, return_routed_experts: "weights" };

class LeftOut extends Error {}

async function post(path, body, key = apiKey) {
  const answer = await fetch(`${url}${path}`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${key}` },
    body: JSON.stringify(body),
    signal: AbortSignal.timeout(ANSWER_MS),
  });
  return { status: answer.status, body: await answer.json() };
}

/** The answer once its prompt is in the prefix store, so that asking again gives the very same one. */
async function settled(path, fields) {
  await post(path, { model, ...fields });
  const { status, body } = await post(path, { model, ...fields });
  deepStrictEqual(status, 200);
  return body;
}

async function refusal(wanted, fields, key) {
  const { status, body } = await post(CHAT_PATH, { model, ...fields }, key);
  if (status === 200) throw new LeftOut(`no ${wanted} from this server`);
  deepStrictEqual(status, wanted);
  return body.error;
}

async function metric(name) {
  const answer = await fetch(`${url}/metrics`, { signal: AbortSignal.timeout(ANSWER_MS) });
  const line = (await answer.text()).split("\n").find((line) => line.startsWith(`pointsman_${name} `));
  return line === undefined ? 0 : Number(line.split(" ").at(-1));
}

async function isIdle() {
  const deadline = Date.now() + IDLE_MS;
  while ((await metric("requests_running")) + (await metric("requests_waiting")) > 0) {
    ok(Date.now() < deadline, "requests are open after all clients left");
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

function clientOf(options = {}) {
  return new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0, ...options });
}

function withoutOwn({ id, created, ...rest }) {
  ok(id.length > 0 && created > 0);
  return rest;
}

function sameBody(answer, wanted) {
  deepStrictEqual(withoutOwn({ ...answer }), withoutOwn(wanted));
}

async function all(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

const reasons = (chunks) => chunks.map((c) => c.choices[0]?.finish_reason).filter(Boolean);
const chatText = (chunks) => chunks.map((c) => c.choices[0]?.delta.content ?? "").join("");

async function models() {
  const listed = await all(clientOf().models.list());
  deepStrictEqual(listed.map((card) => card.id), [model]);
  deepStrictEqual((await clientOf().models.retrieve(model)).id, model);
}

async function chat() {
  const wanted = await settled(CHAT_PATH, CHAT);
  const answer = await clientOf().chat.completions.create({ model, ...CHAT });
  ok(answer.choices[0].message.content.length > 0);
  ok(answer.usage.prompt_tokens_details.cached_tokens > 0);
  sameBody(answer, wanted);
}

async function chatStream() {
  const wanted = await settled(CHAT_PATH, CHAT);
  const chunks = await all(
    await clientOf().chat.completions.create({
      model,
      ...CHAT,
      stream: true,
      stream_options: { include_usage: true },
    }),
  );
  deepStrictEqual(chatText(chunks), wanted.choices[0].message.content);
  deepStrictEqual(reasons(chunks), [wanted.choices[0].finish_reason]);
  deepStrictEqual(chunks.at(-1).choices, []);
  deepStrictEqual(chunks.at(-1).usage, wanted.usage);
}

async function chatStreamHelper() {
  const wanted = await settled(CHAT_PATH, CHAT);
  const stream = clientOf().chat.completions.stream({
    model,
    ...CHAT,
    stream_options: { include_usage: true },
  });
  const pieces = [];
  stream.on("content", (piece) => pieces.push(piece));
  const final = await stream.finalChatCompletion();
  deepStrictEqual(pieces.join(""), wanted.choices[0].message.content);
  deepStrictEqual(final.choices[0].message.content, wanted.choices[0].message.content);
  deepStrictEqual(final.choices[0].finish_reason, wanted.choices[0].finish_reason);
  deepStrictEqual(final.usage, wanted.usage);
}

async function completion() {
  const fields = { ...COMPLETION, echo: true, logprobs: 2 };
  const wanted = await settled("/v1/completions", fields);
  sameBody(await clientOf().completions.create({ model, ...fields }), wanted);
}

async function completionStream() {
  const wanted = await settled("/v1/completions", COMPLETION);
  const chunks = await all(await clientOf().completions.create({ model, ...COMPLETION, stream: true }));
  deepStrictEqual(chunks.map((chunk) => chunk.choices[0].text).join(""), wanted.choices[0].text);
  deepStrictEqual(reasons(chunks), [wanted.choices[0].finish_reason]);
}

/** Fields that OpenAI has not go beside the others. */
async function extraFields() {
  const fields = { ...CHAT, ...EXTRAS };
  const wanted = await settled(CHAT_PATH, fields);
  const answer = await clientOf().chat.completions.create({ model, ...fields });
  sameBody(answer, wanted);
  deepStrictEqual(answer.choices[0].token_ids.length, answer.usage.completion_tokens);
  deepStrictEqual(answer.prompt_logprobs.length, answer.usage.prompt_tokens);
  deepStrictEqual(answer.choices[0].routed_range, [0, answer.usage.total_tokens - 1]);
  const { prompt_logprobs, ...streamed } = fields;
  const chunks = await all(await clientOf().chat.completions.create({ model, ...streamed, stream: true }));
  const told = chunks.map((chunk) => chunk.choices[0].routed_experts).filter(Boolean);
  deepStrictEqual(told, [wanted.choices[0].routed_experts]);
}

/** Without the ids that each answer gives its calls and items anew. */
function nameless(value) {
  if (Array.isArray(value)) return value.map(nameless);
  if (value === null || typeof value !== "object") return value;
  const own = ["id", "call_id", "created", "created_at", "_request_id", "output_text"];
  const kept = Object.entries(value).filter(([name]) => !own.includes(name));
  return Object.fromEntries(kept.map(([name, entry]) => [name, nameless(entry)]));
}

/** A call, whole, streamed and joined by the SDK, and the turn after it. */
async function tools() {
  const wanted = await settled(CHAT_PATH, TOOL_CHAT);
  const [call] = wanted.choices[0].message.tool_calls ?? [];
  if (call === undefined) throw new LeftOut("this model does not call the tool");
  deepStrictEqual(JSON.parse(call.function.arguments), { city: "Paris" });
  const answer = await clientOf().chat.completions.create({ model, ...TOOL_CHAT });
  deepStrictEqual(nameless({ ...answer }), nameless(wanted));
  const chunks = await all(await clientOf().chat.completions.create({ model, ...TOOL_CHAT, stream: true }));
  const deltas = chunks.flatMap((chunk) => chunk.choices[0].delta.tool_calls ?? []);
  deepStrictEqual(deltas.map((delta) => delta.function.arguments ?? "").join(""), call.function.arguments);
  deepStrictEqual(deltas.map((delta) => delta.function.name ?? "").join(""), call.function.name);
  deepStrictEqual(deltas.filter((delta) => delta.id).length, 1);
  deepStrictEqual(reasons(chunks), ["tool_calls"]);
  const joined = await clientOf().chat.completions.stream({ model, ...TOOL_CHAT }).finalChatCompletion();
  deepStrictEqual(joined.choices[0].message.tool_calls[0].function.parsed_arguments, { city: "Paris" });
  const { id } = answer.choices[0].message.tool_calls[0];
  const result = { role: "tool", tool_call_id: id, content: "Sunny, 20 degrees." };
  const messages = [...TOOL_CHAT.messages, answer.choices[0].message, result];
  const again = await clientOf().chat.completions.create({ model, ...TOOL_CHAT, messages });
  const plain = await settled(CHAT_PATH, { ...TOOL_CHAT, messages });
  deepStrictEqual(nameless(again.choices), nameless(plain.choices));
}

async function reasoning() {
  const wanted = await settled(CHAT_PATH, REASONING);
  const told = wanted.choices[0].message.reasoning_content;
  if (!told) throw new LeftOut("this server tells no reasoning apart");
  sameBody(await clientOf().chat.completions.create({ model, ...REASONING }), wanted);
  const chunks = await all(await clientOf().chat.completions.create({ model, ...REASONING, stream: true }));
  deepStrictEqual(chunks.map((chunk) => chunk.choices[0].delta.reasoning_content ?? "").join(""), told);
  deepStrictEqual(chatText(chunks), "");
}

async function jsonSchema() {
  const wanted = await settled(CHAT_PATH, CAPITAL);
  sameBody(await clientOf().chat.completions.create({ model, ...CAPITAL }), wanted);
  const { content } = wanted.choices[0].message;
  deepStrictEqual(Object.keys(JSON.parse(content)).sort(), ["capital", "coastal"]);
  const chunks = await all(await clientOf().chat.completions.create({ model, ...CAPITAL, stream: true }));
  deepStrictEqual(chatText(chunks), content);
  const parsed = await clientOf().chat.completions.parse({ model, ...CAPITAL });
  deepStrictEqual(parsed.choices[0].message.parsed, JSON.parse(content));
}

async function responses() {
  const wanted = await settled("/v1/responses", RESPONSE);
  const answer = await clientOf().responses.create({ model, ...RESPONSE });
  deepStrictEqual(nameless({ ...answer }), nameless(wanted));
  deepStrictEqual(answer.output_text, wanted.output[0].content[0].text);
  const events = await all(await clientOf().responses.create({ model, ...RESPONSE, stream: true }));
  deepStrictEqual(events.map((event) => event.sequence_number), [...events.keys()]);
  const pieces = events.filter((event) => event.type === "response.output_text.delta");
  deepStrictEqual(pieces.map((event) => event.delta).join(""), answer.output_text);
  deepStrictEqual(nameless(events.at(-1).response), nameless(wanted));
}

async function stop() {
  const whole = (await settled(CHAT_PATH, CHAT)).choices[0].message.content;
  const middle = whole.length >> 1;
  const stop = whole.slice(middle, middle + 6);
  const before = whole.slice(0, whole.indexOf(stop));
  const answer = await clientOf().chat.completions.create({ model, ...CHAT, stop });
  deepStrictEqual(answer.choices[0].message.content, before);
  const chunks = await all(await clientOf().chat.completions.create({ model, ...CHAT, stop, stream: true }));
  deepStrictEqual(chatText(chunks), before);
  deepStrictEqual(reasons(chunks), ["stop"]);
}

async function logprobs() {
  const fields = { ...CHAT, logprobs: true, top_logprobs: 3 };
  const wanted = await settled(CHAT_PATH, fields);
  ok(wanted.choices[0].logprobs.content.length > 0);
  sameBody(await clientOf().chat.completions.create({ model, ...fields }), wanted);
}

async function choices() {
  const wanted = await settled(CHAT_PATH, DRAWN);
  sameBody(await clientOf().chat.completions.create({ model, ...DRAWN }), wanted);
  const texts = ["", "", ""];
  for await (const chunk of await clientOf().chat.completions.create({ model, ...DRAWN, stream: true })) {
    for (const choice of chunk.choices) texts[choice.index] += choice.delta.content ?? "";
  }
  deepStrictEqual(texts, wanted.choices.map((choice) => choice.message.content));
  ok(new Set(texts).size > 1, "choices that differ");
}

async function leaving() {
  const aborted = 'requests_finished_total{reason="abort"}';
  const before = await metric(aborted);
  const stream = await clientOf().completions.create({
    model,
    prompt: "Once upon a time",
    max_tokens: 3000,
    ignore_eos: true,
    stream: true,
  });
  let seen = 0;
  for await (const _ of stream) {
    seen += 1;
    if (seen === 3) break;
  }
  await isIdle();
  deepStrictEqual((await metric(aborted)) - before, 1);
}

function refusedWith(kind, wanted) {
  return (error) => {
    deepStrictEqual(error.constructor.name, kind.name);
    deepStrictEqual(error.error, wanted);
    deepStrictEqual([error.param, error.code, error.type], [wanted.param, wanted.code, wanted.type]);
    return true;
  };
}

async function error400() {
  const fields = { ...CHAT, temperature: 3 };
  const refused = refusedWith(OpenAI.BadRequestError, await refusal(400, fields));
  for (const stream of [false, true]) {
    await rejects(clientOf().chat.completions.create({ model, ...fields, stream }), refused);
  }
}

async function error401() {
  const refused = refusedWith(OpenAI.AuthenticationError, await refusal(401, CHAT, "not a key"));
  const client = clientOf({ apiKey: "not a key" });
  await rejects(client.chat.completions.create({ model, ...CHAT }), refused);
}

async function error404() {
  const fields = { ...CHAT, model: "no-such-model" };
  const refused = refusedWith(OpenAI.NotFoundError, await refusal(404, fields));
  await rejects(clientOf().chat.completions.create(fields), refused);
}

async function error429() {
  const fields = { ...CHAT, n: MOST_CHOICES, max_tokens: 1 };
  const refused = refusedWith(OpenAI.RateLimitError, await refusal(429, fields));
  await rejects(clientOf().chat.completions.create({ model, ...fields }), refused);
}

const CHECKS = [
  ["models", models],
  ["chat", chat],
  ["chat stream", chatStream],
  ["chat stream helper", chatStreamHelper],
  ["completion, echo", completion],
  ["completion stream", completionStream],
  ["stop", stop],
  ["log-probs", logprobs],
  ["seeded choices", choices],
  ["leaving a stream", leaving],
  ["token ids, prompt log-probs, experts beside the others", extraFields],
  ["tools", tools],
  ["reasoning", reasoning],
  ["json_schema, parse", jsonSchema],
  ["responses", responses],
  ["400", error400],
  ["401", error401],
  ["404", error404],
  ["429", error429],
];

for (const [name, check] of CHECKS) {
  try {
    await check();
    console.log(`checked ${name}`);
  } catch (error) {
    if (error instanceof LeftOut) {
      console.log(`left out ${name}: ${error.message}`);
      continue;
    }
    console.log(`failed ${name}: ${String(error.message).replace(/\s+/g, " ")}`);
    console.error(error);
    process.exitCode = 1;
  }
}
