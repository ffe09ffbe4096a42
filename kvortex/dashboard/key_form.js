// The page was refused without a key. With one, it is fetched again and takes this document's place.
async function open_with(key) {
  const answer = await fetch(location.href, { headers: { Authorization: `Bearer ${key}` } });
  if (answer.status === 401) return "The server does not know this key.";
  if (!answer.ok) return `The server answers ${answer.status}.`;
  const page = await answer.text();
  sessionStorage.setItem("kvortex-api-key", key);
  document.open();
  document.write(page);
  document.close();
  return "";
}

async function try_key(key) {
  const error = document.getElementById("error");
  try {
    error.textContent = await open_with(key);
  } catch (failure) {
    error.textContent = `The server does not answer: ${failure.message}`;
  }
}

document.getElementById("form").addEventListener("submit", (event) => {
  event.preventDefault();
  try_key(document.getElementById("key").value);
});
const kept = sessionStorage.getItem("kvortex-api-key");
if (kept !== null) try_key(kept);
