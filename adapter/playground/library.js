// The conversations of this browser, in IndexedDB. They are never sent to the server as a whole.

const opened = new Promise((resolve, reject) => {
  const request = indexedDB.open("latimer", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("conversations", { keyPath: "id" });
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});
// In a private window there may be no database; conversations last as long as the page then.
const memory = new Map();
// A reply that still ends does not bring a deleted conversation back.
const removed = new Set();

async function run(mode, act) {
  const database = await opened;
  return new Promise((resolve, reject) => {
    const request = act(database.transaction("conversations", mode).objectStore("conversations"));
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export async function save(conversation) {
  if (removed.has(conversation.id)) return;
  memory.set(conversation.id, conversation);
  await run("readwrite", (store) => store.put(structuredClone(conversation))).catch(() => {});
}

export async function remove(id) {
  removed.add(id);
  memory.delete(id);
  await run("readwrite", (store) => store.delete(id)).catch(() => {});
}

/** Return all conversations, the newest first. */
export async function list() {
  const found = await run("readonly", (store) => store.getAll()).catch(() => [...memory.values()]);
  return found.sort((a, b) => b.changed - a.changed);
}
