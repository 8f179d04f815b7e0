// Requests to the service, and its errors in words.

let key = sessionStorage.getItem("key") || "";
let asking = null; // the dialog that is open, for all requests that wait for a key

export class Refused extends Error {}

function askForKey() {
  const dialog = document.getElementById("keydialog");
  const field = document.getElementById("key");
  document.getElementById("wrongkey").hidden = !key;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done, refused) => dialog.addEventListener("close", () => {
    asking = null;
    if (dialog.returnValue !== "given") return refused(new Refused("This service asks for a key. Load the page again to give one."));
    key = field.value;
    field.value = "";
    sessionStorage.setItem("key", key);
    done();
  }, { once: true }));
}

export async function call(path, options = {}) {
  for (;;) {
    const sent = key;
    const headers = { ...(options.headers || {}), ...(sent ? { authorization: `Bearer ${sent}` } : {}) };
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused("The service cannot be reached. Is it running?");
    }
    if (response.ok) return response;
    if (response.status === 401) {
      if (sent === key) await (asking ??= askForKey()); // else it was given while this was under way
      continue;
    }
    let words = `The service answered ${response.status}.`;
    try {
      words = (await response.json()).error || words;
    } catch { /* not from the service itself */ }
    throw new Refused(words.charAt(0).toUpperCase() + words.slice(1));
  }
}

const at = (index) => `api/indexes/${encodeURIComponent(index)}`;

export async function service() {
  return (await call("api/indexes")).json();
}

async function posted(path, body, signal) {
  const headers = { "content-type": "application/json" };
  return (await call(path, { method: "POST", headers, body: JSON.stringify(body), signal })).json();
}

// A query is {file}, {id} or nothing, with a box or without; page is {k, offset, where, expect}.
export async function search(index, query, page, signal) {
  if (query.file) {
    const form = new FormData();
    form.append("pictures", query.file, "picture");
    if (query.box) form.append("boxes", JSON.stringify([query.box]));
    form.append("k", page.k);
    form.append("offset", page.offset);
    form.append("where", JSON.stringify(page.where));
    if (page.expect) form.append("expect", page.expect);
    return (await call(`${at(index)}/search/pictures`, { method: "POST", body: form, signal })).json();
  }
  if (query.id !== undefined) {
    const one = query.box ? { id: query.id, box: query.box } : { id: query.id };
    const { k, offset, where } = page;
    const body = { queries: [one], k, offset, where, ...(page.expect ? { expect: page.expect } : {}) };
    return posted(`${at(index)}/search`, body, signal);
  }
  const { k, offset, where } = page;
  const found = await posted(`${at(index)}/list`, { k, offset, where }, signal);
  return { answers: [{ results: found.results, more: found.more, expected: null }], count: found.count };
}

const address = (index, id, side) => `${at(index)}/picture?id=${encodeURIComponent(id)}&side=${side}`;

// The picture of a row and its size in pixels: the size is that of the file, the picture may be smaller.
export async function picture(index, id, side) {
  const response = await call(address(index, id, side));
  const size = (response.headers.get("x-original-size") || "0x0").split("x").map(Number);
  return { url: URL.createObjectURL(await response.blob()), size };
}

// Pictures of results go straight into the page, unless a key must be sent with the request.
export async function show(image, index, id) {
  if (!key) {
    image.src = address(index, id, 320);
    return;
  }
  const { url } = await picture(index, id, 320);
  image.addEventListener("load", () => URL.revokeObjectURL(url), { once: true });
  image.src = url;
}
