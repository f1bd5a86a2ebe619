// An environment in Node.js, made from the proto files alone: the model guesses a number from the hints "higher" and "lower".
//
// Usage: node server.js [HOST:PORT]       (default 127.0.0.1:7321)
"use strict";

const fs = require("node:fs");
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const PROTOS = process.env.PENSTOCK_PROTOS || path.join(__dirname, "..", "..", "protos");
const MAX_TURNS = 5;
const LARGEST = 99;
const MAX_SESSIONS = 1024;
const MAX_IDLE_MS = 30 * 60 * 1000;

// By session id: the number, the nearest guess so far, and every turn with its answer.
const sessions = new Map();

function fail(code, details) {
  return Object.assign(new Error(details), { code, details });
}

function closeIdle() {
  for (const [name, session] of sessions) {
    if (Date.now() - session.calledMs > MAX_IDLE_MS) sessions.delete(name);
  }
}

function reset({ sessionId, answer, restarts }) {
  if (!sessionId) throw fail(grpc.status.INVALID_ARGUMENT, "session_id: empty");
  if (!/^\s*\d+\s*$/.test(answer)) {
    throw fail(grpc.status.INVALID_ARGUMENT, `answer: '${answer}'; must be a number from 0 to ${LARGEST}`);
  }
  if (restarts) sessions.delete(sessionId);
  if (!sessions.has(sessionId)) {
    closeIdle();
    if (sessions.size >= MAX_SESSIONS) throw fail(grpc.status.RESOURCE_EXHAUSTED, `${MAX_SESSIONS} sessions are open`);
    sessions.set(sessionId, { number: parseInt(answer, 10), nearest: LARGEST + 1, turns: [], calledMs: Date.now() });
  }
  return { maxTurns: MAX_TURNS };
}

function judge(session, text, turn) {
  const isLast = turn + 1 >= MAX_TURNS;
  const found = text.match(/\d+/g);
  let said = "write a number";
  let reward = 0;
  if (found) {
    const guess = Math.min(parseInt(found[found.length - 1].slice(0, 4), 10), LARGEST);
    if (guess === session.number) return { reward: 1, done: true, components: { found: 1 } };
    const distance = Math.abs(guess - session.number);
    reward = distance < session.nearest ? 0.1 : 0;
    session.nearest = Math.min(session.nearest, distance);
    said = guess < session.number ? "higher" : "lower";
  }
  const messages = isLast ? [] : [{ role: "user", content: `${said}\n` }];
  return { messages, reward, done: isLast, components: { found: 0 } };
}

function step({ sessionId, turn, text, finishReason }) {
  const session = sessions.get(sessionId);
  if (!session) throw fail(grpc.status.NOT_FOUND, `session_id: '${sessionId}' is not open here`);
  session.calledMs = Date.now();
  const asked = `${finishReason} ${text}`;
  const last = session.turns[session.turns.length - 1];
  const isNext = turn === session.turns.length && !(last && last.answer.done);
  if (isNext) session.turns.push({ asked, answer: judge(session, text, turn) });
  // A repeated call gets the stored answer: generators and their connections may die at any moment.
  const taken = session.turns[turn];
  if (!taken || taken.asked !== asked) {
    throw fail(grpc.status.FAILED_PRECONDITION, `turn: ${turn} is not the next one, or was taken with another text`);
  }
  return { status: "SCORE_STATUS_OK", ...taken.answer };
}

function close({ sessionId }) {
  sessions.delete(sessionId);
  return {};
}

function getEnvironment() {
  return { name: "guess-node", version: "1", maxSessions: MAX_SESSIONS };
}

function answering(method) {
  return (call, respond) => {
    try {
      respond(null, method(call.request));
    } catch (error) {
      respond(error.code ? error : fail(grpc.status.INTERNAL, String(error)));
    }
  };
}

function load(file, directory) {
  const options = { keepCase: false, longs: Number, enums: String, defaults: true, oneofs: true, includeDirs: [directory] };
  return grpc.loadPackageDefinition(protoLoader.loadSync(file, options));
}

function main(listen) {
  const server = new grpc.Server({ "grpc.max_receive_message_length": 16 * 1024 * 1024 });
  const { EnvironmentService } = load("penstock/v1/environment.proto", PROTOS).penstock.v1;
  const methods = { reset, step, close, getEnvironment };
  const handlers = Object.fromEntries(Object.entries(methods).map(([name, method]) => [name, answering(method)]));
  server.addService(EnvironmentService.service, handlers);
  // Health is what load balancers and `penstock run` look at; its proto is beside this file.
  const { Health } = load("health.proto", __dirname).grpc.health.v1;
  server.addService(Health.service, { check: (_call, respond) => respond(null, { status: "SERVING" }) });
  server.bindAsync(listen, grpc.ServerCredentials.createInsecure(), (error, port) => {
    if (error) {
      console.error(`cannot listen on ${listen}: ${error.message}`);
      process.exit(1);
    }
    console.log(`environment is served on ${listen.replace(/:\d+$/, "")}:${port}`);
  });
  for (const signal of ["SIGTERM", "SIGINT"]) {
    process.once(signal, () => {
      // Calls in progress end first; those that last longer than five seconds are cut off.
      setTimeout(() => server.forceShutdown(), 5000).unref();
      server.tryShutdown(() => process.exit(0));
    });
  }
}

if (!fs.existsSync(path.join(PROTOS, "penstock", "v1", "environment.proto"))) {
  const found = `no penstock/v1/environment.proto under ${PROTOS}`;
  console.error(`${found}; set PENSTOCK_PROTOS to the folder of Penstock's protos`);
  process.exit(2);
}
main(process.argv[2] || "127.0.0.1:7321");
