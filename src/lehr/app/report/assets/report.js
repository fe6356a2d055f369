(() => {
  const root = document.documentElement;
  const prefers = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const apply = () => { root.dataset.theme = chosen ?? (prefers.matches ? "dark" : "light"); };
  prefers.addEventListener("change", apply);
  document.getElementById("theme").addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    apply();
  });
  apply();
})();
