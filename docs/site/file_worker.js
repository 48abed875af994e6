/* Browsers start no worker for pages that are read as files. The search index is then searched in a hidden frame that has
   the interface of a worker. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      addEventListener("message", (event) => {
        if (event.source !== this.inner) return;
        const copy = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(copy);
        if (this.onmessage) this.onmessage(copy);
      });
      this.inner.document.open();
      this.inner.document.write(`<body><script>
        postMessage = (data) => parent.dispatchEvent(new MessageEvent("message", { data, source: window }));
        importScripts = (...urls) => urls.reduce((former, src) => former.then(() => new Promise((onload) => {
          document.body.append(Object.assign(document.createElement("script"), { src, onload }));
        })), Promise.resolve());
      <\/script><script src="${url}"><\/script>`);
      this.inner.document.close();
    }
    postMessage(data) {
      const send = () => this.inner.dispatchEvent(new MessageEvent("message", { data }));
      if (this.inner.document.readyState === "complete") send();
      else this.inner.addEventListener("load", send, { once: true });
    }
    terminate() {}
  };
}
