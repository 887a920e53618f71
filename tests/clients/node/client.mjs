// What a JavaScript program sees of a server through the openai package. Prints one JSON object of findings.
// Usage: node client.mjs BASE_URL MODEL

import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "Say hello." }];
const found = {};

const whole = await client.chat.completions.create({ model, messages, max_tokens: 12, temperature: 0, seed: 1 });
found.whole = whole;
found.requestId = whole._request_id;

const stream = await client.chat.completions.create({
  model,
  messages,
  max_tokens: 12,
  temperature: 0,
  seed: 1,
  stream: true,
  stream_options: { include_usage: true },
});
found.text = "";
found.finishReasons = [];
found.chunks = 0;
for await (const chunk of stream) {
  found.chunks += 1;
  for (const choice of chunk.choices) {
    found.text += choice.delta.content ?? "";
    if (choice.finish_reason) found.finishReasons.push(choice.finish_reason);
  }
  if (chunk.usage) found.usage = chunk.usage;
}

const helper = client.chat.completions.stream({ model, messages, max_tokens: 12, temperature: 0, seed: 1 });
found.helperText = (await helper.finalChatCompletion()).choices[0].message.content;

const completion = await client.completions.create({ model, prompt: "Once upon", max_tokens: 4, logprobs: 1 });
found.completion = completion.choices[0];

async function errorOf(call) {
  try {
    await call();
    return null;
  } catch (error) {
    const { status, code, type, param, message, requestID } = error;
    return { name: error.constructor.name, status, code, type, param, message, requestID };
  }
}
found.badRequest = await errorOf(() => client.chat.completions.create({ model, messages: [] }));
found.notFound = await errorOf(() => client.chat.completions.create({ model: "no-such-model", messages }));
found.tooLong = await errorOf(() =>
  client.chat.completions.create({ model, messages: [{ role: "user", content: "word ".repeat(200_000) }], stream: true }),
);

const endless = await client.chat.completions.create({
  model,
  messages,
  max_tokens: 2000,
  stream: true,
  ignore_eos: true,
});
found.seenBeforeAbort = 0;
for await (const chunk of endless) {
  found.seenBeforeAbort += chunk.choices.length;
  if (found.seenBeforeAbort >= 3) endless.controller.abort();
}
found.models = (await client.models.list()).data.map((card) => card.id);

console.log(JSON.stringify(found));
